"""veRL's V1 trainers with group-relative advantages, metrics, alarms and an end in time.

Formulas for advantages and rewards are in `verl_ext.method`.
"""
