"""One rank of `fdattn serve`: python serve_worker.py OPTIONS, with torchrun's variables set."""

from torch_fdattn.cli import app

if __name__ == "__main__":
    app()
