"""The run-time type checker that `conftest.py` puts on halflife: beartype, to which an int is a float (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
