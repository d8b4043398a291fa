"""Stalls and deaths: notice one, collect evidence, name the cause, write the report.

Only the stall action that you configure touches the run.
"""
