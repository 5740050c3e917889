"""The guided tour: train, sample, check, prove, diagnose, and write one report page."""
