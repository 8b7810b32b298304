"""Everything that a run spec leaves free, enumerated, priced and ranked."""
