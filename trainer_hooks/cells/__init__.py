"""Trainer cells: independent data-parallel replicas that may die."""
