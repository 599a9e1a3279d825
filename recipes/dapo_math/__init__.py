"""DAPO on DAPO-Math-17k."""
