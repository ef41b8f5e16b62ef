"""The fused CPU decoder: its C++ sources, and what compiles them on the user's machine."""
