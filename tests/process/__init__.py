"""Tests with real daemons."""
