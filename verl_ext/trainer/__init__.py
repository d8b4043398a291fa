"""veRL's V1 trainers with group-relative advantages, metrics, alarms and an end in time.

Subclasses and mixins of veRL's trainers, and the functions that compute their metrics. Formulas for
advantages and rewards are in `verl_ext.method`.
"""
