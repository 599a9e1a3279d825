"""64 mathematics problems in the schema of DeepMath-103K, written for this project, and the loader for both."""

from recipes.deepmath_sample.loader import FEATURES, SAMPLE, load_problems

__all__ = ["FEATURES", "SAMPLE", "load_problems"]
