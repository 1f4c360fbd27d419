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
    """The lines below a heading: a list of terms where they look like one, else as they are."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    verbatim = heading in ("EXAMPLES", "SYNOPSIS", "DESCRIPTION", "OUTPUT") or not all(indent >= 2 for indent in indents)
    if verbatim:
        cut = min(indents, default=0)
        return [".nf", *(escape(line[cut:]) for line in lines), ".fi"]
    out = []
    for line in lines:
        match = TERM.match(line)
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
    sections = [("DESCRIPTION", [])]
    for line in rest.splitlines():
        if line.startswith("Usage:"):
            sections.append(("SYNOPSIS", [line.removeprefix("Usage:")]))
        elif HEADING.match(line):
            sections.append((line[:-1].upper(), []))
        elif sections[-1][0] not in ("DESCRIPTION",) and line and not line.startswith(" "):
            # A paragraph after a list of options.
            sections.append(("DESCRIPTION", [line]))
        else:
            sections[-1][1].append(line)
    for heading, lines in sections:
        while lines and not lines[-1].strip():
            lines.pop()
        while lines and not lines[0].strip():
            lines.pop(0)
        if lines:
            out += [f'.SH "{heading}"', *section(heading, lines)]
    listed = [lines for heading, lines in sections if heading == "COMMANDS"]
    below = [match[2] for line in (listed[0] if listed else []) if (match := TERM.match(line)) and match[3]]
    below = [command for command in below if command != "help"]
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
