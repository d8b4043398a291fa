"""Stalls and deaths: notice one, collect evidence, name the cause, write the report."""
