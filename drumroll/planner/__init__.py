"""Memory and traffic of a run, foreseen before anything is launched, and the tool that measures what was foreseen."""
