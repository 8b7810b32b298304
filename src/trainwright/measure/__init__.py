"""Predictions held against measurements: records of runs, errors with sign, coverage of intervals."""
