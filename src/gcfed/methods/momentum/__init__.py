"""The cohort's momentum in local steps."""
