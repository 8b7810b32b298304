"""Equations over columns: memory, traffic, time, money of every row of a `PlanTable` at once."""
