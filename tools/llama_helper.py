"""Runs llama.cpp for the tools that write reference values."""

import os
import shlex
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def run(*command):
    """The output of a command; ends the program where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.returncode}\n{done.stderr.strip()[-500:]}")
    return done.stdout


def compile_helper(llama_cpp, libraries, name="llama-logits", more=()):
    """Compiles tools/NAME.cpp with the sources of llama.cpp and the folder of its libraries, of which it links libllama and `more`;
    the program's path."""
    out = os.path.join(ROOT, "target", name)
    os.makedirs(os.path.dirname(out), exist_ok=True)
    include = [f"-I{os.path.join(llama_cpp, folder)}" for folder in ("include", "ggml/include", "tools/mtmd")]
    source = os.path.join(ROOT, "tools", f"{name}.cpp")
    names = [*more, "llama", "ggml", "ggml-base"]
    link = [f"-L{libraries}", *(f"-l{library}" for library in names), f"-Wl,-rpath,{os.path.abspath(libraries)}"]
    run("c++", "-O2", "-std=c++17", *include, source, *link, "-o", out)
    return out
