"""The face: one subcommand a file, no maths."""
