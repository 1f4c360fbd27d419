"""Manual pages from the help of the program and of each of its commands."""

import os
import re
import subprocess

# An option, a command or a variable, and after two spaces the beginning of what it means.
TERM = re.compile(r"^( {2,6})(\S(?:.*?\S)?)(?: {2,}(\S.*))?$")
HEADING = re.compile(r"^[A-Z][A-Za-z ]*:$")


def help_of(program, command):
    # Wide enough that no line of the help is wrapped; man wraps them.
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run([program, *command, "--help"], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"tools/release/make: {program} {' '.join(command)} --help failed: {done.stderr.strip()}")
    return done.stdout


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def section(heading, lines):
    """The lines below a heading: examples as they are, a list of terms if they look like one, else paragraphs."""
    if heading in ("EXAMPLES", "SYNOPSIS"):
        return [".nf", *(escape(line.strip()) for line in lines), ".fi"]
    matches = [TERM.match(line) for line in lines]
    if not any(match and (match[3] or match[2].startswith("-")) for match in matches):
        return [escape(line.strip()) if line.strip() else ".PP" for line in lines]
    out = []
    for line, match in zip(lines, matches):
        if match:
            out += [".TP", f".B {escape(match[2])}"] + ([escape(match[3])] if match[3] else [])
        elif line.strip():
            out.append(escape(line.strip()))
    return out


def page(program, command, version, date):
    """The page's name and text, and the commands below the command."""
    name = "-".join(["metal-attention", *command])
    about, _, rest = help_of(program, command).partition("\n")
    out = [f'.TH {name.upper()} 1 "{date}" "metal-attention {version}"', ".SH NAME", f"{name} \\- {escape(about)}"]
    # Whatever stands below no heading describes the command.
    sections = {"SYNOPSIS": [], "DESCRIPTION": []}
    heading = "DESCRIPTION"
    for line in rest.splitlines():
        if line.startswith("Usage:"):
            heading, line = "SYNOPSIS", line.removeprefix("Usage:")
        elif HEADING.match(line):
            heading, line = line[:-1].upper(), ""
        elif line and not line.startswith(" "):
            heading = "DESCRIPTION"
        sections.setdefault(heading, []).append(line)
    for heading, lines in sections.items():
        lines[:] = "\n".join(lines).strip("\n").splitlines()
        if lines:
            out += [f'.SH "{heading}"', *section(heading, lines)]
    below = [match[2] for line in sections.get("COMMANDS", []) if (match := TERM.match(line)) and match[2] != "help"]
    if below:
        out += [".SH SEE ALSO", ", ".join(f"\\fB{name}\\-{escape(command)}\\fR(1)" for command in below)]
    return name, "\n".join(out) + "\n", below


def write(program, folder, version, date):
    """Writes the pages of all commands."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = [[]]
    while commands:
        command = commands.pop()
        name, text, below = page(program, command, version, date)
        (folder / f"{name}.1").write_text(text)
        commands += [[*command, next_one] for next_one in below]
