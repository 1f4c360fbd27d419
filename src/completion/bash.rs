//! Completion in bash, where `:` and `=` separate words: the script joins them, as `llama3.2:1b` is one argument.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_complete::engine::complete;
use clap_complete::env::EnvCompleter;

/// The number of the word to complete, in the environment of a call.
const INDEX: &str = "_COMPLETE_INDEX";

/// A function that fills `COMPREPLY`. `line` is what stands before the cursor; a word of bash that follows without a space belongs
/// to the argument before it. Bash replaces its own word alone, so that the rest of the argument is cut from each candidate.
const SCRIPT: &str = r#"_@NAME@() {
    local line="${COMP_LINE:0:COMP_POINT}" arguments=() i word
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word="${COMP_WORDS[i]}"
        if ((i == 0)) || [[ "$line" == [[:space:]]* ]]; then
            line="${line#"${line%%[![:space:]]*}"}"
            arguments+=("")
        fi
        if ((i == COMP_CWORD)); then
            word="$line"
        fi
        arguments[${#arguments[@]} - 1]+="$word"
        line="${line#"$word"}"
    done
    local last=$((${#arguments[@]} - 1)) IFS=$'\n'
    local before="${arguments[last]%"${arguments[last]##*[:=]}"}"
    COMPREPLY=($(@INDEX@="$last" @VARIABLE@=bash @COMPLETER@ -- "${arguments[@]}" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=/:] ]]; then
        compopt -o nospace
    fi
}
complete -o bashdefault -o nosort -F _@NAME@ @PROGRAM@ 2>/dev/null || complete -o bashdefault -F _@NAME@ @PROGRAM@
"#;

/// Bash.
pub struct Bash;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == "bash"
    }

    fn write_registration(
        &self,
        variable: &str,
        name: &str,
        program: &str,
        completer: &str,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let script = SCRIPT.replace("@NAME@", &name.replace('-', "_")).replace("@INDEX@", INDEX);
        let script = script.replace("@VARIABLE@", variable).replace("@PROGRAM@", program);
        out.write_all(script.replace("@COMPLETER@", completer).as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut Command,
        arguments: Vec<OsString>,
        folder: Option<&Path>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let index = std::env::var(INDEX).ok().and_then(|index| index.parse().ok()).unwrap_or(arguments.len() - 1);
        for candidate in complete(command, arguments, index, folder)? {
            writeln!(out, "{}", candidate.get_value().to_string_lossy())?;
        }
        Ok(())
    }
}
