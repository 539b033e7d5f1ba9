"""What a person starts beside a run."""
