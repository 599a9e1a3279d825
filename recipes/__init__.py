"""Recipes: data, models and configuration that runs of the engine start from."""
