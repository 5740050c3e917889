"""The theory of Transformers as code that runs: claims with their checks, and exercises with their graders."""
