"""Tables of the commands, on a terminal and as files, a file a subject."""
