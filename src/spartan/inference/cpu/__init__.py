"""Runs sparse layers on the CPU: C++ kernels, their build, and the calls."""
