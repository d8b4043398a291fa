"""veRL's V1 trainers with group-relative advantages, metrics, alarms and an end in time."""
