"""Tables, figures and the report page of runs."""
