"""drumroll: reinforcement-learning post-training on training backends that are proven right."""

__version__ = "0.1.0"
