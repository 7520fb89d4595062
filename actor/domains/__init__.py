"""Built-in domains: each makes tasks from seeds and scores completions."""
