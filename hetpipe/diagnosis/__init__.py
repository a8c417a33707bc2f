"""Diagnosis: compares a pipeline's programs with torch and names the operator at fault."""
