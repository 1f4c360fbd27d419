//! Reads the command line: replaces flags of other programs by this program's, and adds tips to clap's errors.
//!
//! `rewrite` runs before clap. It replaces each flag that `foreign_flags.rs` lists, and refuses flags that clap would
//! misread (`-temp` as `-t emp`). `advised` adds a tip to an error of clap about a stray model name or text.

use std::ffi::{OsStr, OsString};
use std::io::Write;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, CommandFactory, Parser};
use metal_attention_hub::{is_hub_address, known_model};

use crate::Cli;
use crate::find_model::without_ending;
use crate::foreign_flags::{FlagMeaning, FlagValue, ModelPart, ValueMeaning, cache_type, find_flag, foreign_command};

/// Reads the command line. On a mistake prints the error with a tip and ends the process.
pub fn parse() -> Cli {
    let args: Vec<OsString> = std::env::args_os().collect();
    let RewrittenArgs { args, notes } = rewrite(&args).unwrap_or_else(|error| error.exit());
    for note in notes {
        // If stderr is closed, the notes are lost; the command runs nevertheless.
        let _ = writeln!(std::io::stderr(), "note: {note}");
    }
    Cli::try_parse_from(&args).unwrap_or_else(|error| advised(error, &args).exit())
}

/// The command line that clap reads.
#[derive(Debug)]
struct RewrittenArgs {
    /// The arguments, the program's name first.
    args: Vec<OsString>,
    /// A message for each flag that is ignored, with the reason.
    notes: Vec<String>,
}

/// Replaces flags of other programs by this program's. Arguments after `--` are kept.
fn rewrite(args: &[OsString]) -> Result<RewrittenArgs, clap::Error> {
    let mut cli = Cli::command();
    cli.build();
    let is_flag = |arg: &&OsString| arg.as_encoded_bytes().starts_with(b"-");
    let at = 1 + args.iter().skip(1).take_while(is_flag).count();
    // Only global flags may stand before the command.
    for flag in args.iter().skip(1).take(at - 1).filter_map(|arg| arg.to_str()) {
        if own_flag(&cli, name_of(flag)).is_none() && !is_cluster(&cli, flag) {
            return Err(refused(&mut cli, flag, &format!("a command comes first, as in metal-attention run {flag}")));
        }
    }
    let Some(name) = args.get(at).and_then(|arg| arg.to_str()) else {
        return Ok(RewrittenArgs { args: args.to_vec(), notes: Vec::new() });
    };
    if cli.find_subcommand(name).is_none()
        && let Some(tip) = foreign_command(name)
    {
        return Err(no_such_command(&mut cli, name, tip));
    }
    let mut command = &mut cli;
    let mut n_names = 0;
    while let Some(name) = args.get(at + n_names).and_then(|arg| arg.to_str())
        && command.find_subcommand(name).is_some()
    {
        command = command.find_subcommand_mut(name).expect("it was just found");
        n_names += 1;
    }
    if n_names == 0 {
        return Ok(RewrittenArgs { args: args.to_vec(), notes: Vec::new() });
    }
    let begin = at + n_names;
    let mut rewriter = ArgRewriter { command, rest: &args[begin..], args: args[..begin].to_vec(), notes: Vec::new() };
    let mut given = ModelFlags::default();
    while let Some(arg) = rewriter.next() {
        match arg.to_str() {
            Some("--") => {
                rewriter.args.push(arg.clone());
                rewriter.args.extend_from_slice(rewriter.rest);
                break;
            }
            Some(flag) if flag.len() > 1 && flag.starts_with('-') && flag.parse::<f64>().is_err() => {
                rewriter.flag(arg, flag, &mut given)?;
            }
            _ => rewriter.args.push(arg.clone()),
        }
    }
    rewriter.end(&given, begin)?;
    Ok(RewrittenArgs { args: rewriter.args, notes: rewriter.notes })
}

/// The values of flags of other programs of which several together become one flag of this program.
#[derive(Default)]
struct ModelFlags {
    /// The value of `-hf`: the repository.
    repo: Option<String>,
    /// The value of `-hff`: the file in the repository.
    file: Option<String>,
    /// The values of `--cache-type-k` and `--cache-type-v`, in the order they were given.
    cache_types: Vec<String>,
}

/// The state of rewriting the arguments of one command.
struct ArgRewriter<'a> {
    /// The command whose arguments they are.
    command: &'a mut Command,
    /// The arguments that are not read yet.
    rest: &'a [OsString],
    /// The arguments for clap so far.
    args: Vec<OsString>,
    /// The notes so far, as in [`RewrittenArgs`].
    notes: Vec<String>,
}

impl<'a> ArgRewriter<'a> {
    /// Takes the next argument.
    fn next(&mut self) -> Option<&'a OsString> {
        let (arg, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(arg)
    }

    /// Rewrites the flag `arg`, whose text is `flag`, and its value. Values in `ModelFlags` are added to `given` and are
    /// written by [`Self::end`].
    fn flag(&mut self, arg: &OsString, flag: &str, given: &mut ModelFlags) -> Result<(), clap::Error> {
        if let Some(own) = own_flag(self.command, name_of(flag)) {
            let takes_value = own.get_action().takes_values() && name_of(flag) == flag;
            let hyphens = own.is_allow_hyphen_values_set();
            self.args.push(arg.clone());
            // The next argument is the value, even if it begins with a dash.
            if takes_value && hyphens {
                let value = self.next().cloned();
                self.args.extend(value);
            }
            return Ok(());
        }
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, None),
        };
        let Some(entry) = find_flag(self.command.get_name(), name) else {
            if let Some(tip) = misread(self.command, flag) {
                return Err(refused(self.command, name, &tip));
            }
            self.args.push(arg.clone());
            return Ok(());
        };
        let value: Option<OsString> = match (entry.value, inline) {
            (_, Some(value)) => Some(value.into()),
            (FlagValue::Nothing, None) => None,
            (FlagValue::Value, None) => match self.next() {
                Some(value) => Some(value.clone()),
                None => return Err(refused(self.command, name, "a value follows this flag")),
            },
            (FlagValue::Maybe(values), None) => {
                let follows =
                    self.rest.first().and_then(|next| next.to_str()).is_some_and(|next| values.contains(&next));
                if follows { self.next().cloned() } else { None }
            }
        };
        let text = value.as_deref().map(OsStr::to_string_lossy).unwrap_or_default();
        match entry.meaning {
            FlagMeaning::Flag(own) => {
                let args = [Some(own.into()), value].into_iter().flatten().collect();
                self.put(name, args);
            }
            FlagMeaning::Nothing(why) => self.notes.push(format!("{name} is passed over: {why}")),
            FlagMeaning::Refused(tip) => return Err(refused(self.command, name, tip)),
            FlagMeaning::ByValue(meaning) => self.outcome(name, meaning(&text))?,
            FlagMeaning::Model(ModelPart::Repo) => given.repo = Some(text.into_owned()),
            FlagMeaning::Model(ModelPart::File) => given.file = Some(text.into_owned()),
            FlagMeaning::Cache => given.cache_types.push(text.into_owned()),
        }
        Ok(())
    }

    /// Applies the meaning of a value of `flag`.
    fn outcome(&mut self, flag: &str, outcome: ValueMeaning) -> Result<(), clap::Error> {
        match outcome {
            ValueMeaning::Args(args) => self.put(flag, args.into_iter().map(OsString::from).collect()),
            ValueMeaning::Nothing(why) => self.notes.push(format!("{flag} is passed over: {why}")),
            ValueMeaning::Refused(tip) => return Err(refused(self.command, flag, &tip)),
        }
        Ok(())
    }

    /// Writes `args` in place of `flag`, if the command has the flag that `args` begin with. Otherwise notes that the flag
    /// is ignored.
    fn put(&mut self, flag: &str, args: Vec<OsString>) {
        let own = args.first().and_then(|own| own.to_str());
        if own.is_some_and(|own| own_flag(self.command, own).is_none()) {
            self.notes.push(format!("{flag} is passed over: it changes nothing in `{}`", self.command.get_name()));
        } else {
            self.args.extend(args);
        }
    }

    /// Inserts the flags that `given` becomes after the command's name, which ends at index `begin` of `args`.
    fn end(&mut self, given: &ModelFlags, begin: usize) -> Result<(), clap::Error> {
        let model = match (&given.repo, &given.file) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(refused(self.command, "-hff", "-hf OWNER/REPO names the repository of the file"));
            }
            (Some(repo), file) => {
                let prefix = if is_hub_address(repo) { "" } else { "hf:" };
                let file = file.as_ref().map(|file| format!(":{file}")).unwrap_or_default();
                Some(format!("{prefix}{repo}{file}"))
            }
        };
        let after = self.args.split_off(begin);
        if let Some(model) = model {
            self.put("-hf", vec!["--model".into(), model.into()]);
        }
        let flag = if given.cache_types.len() > 1 { "--cache-type-k, --cache-type-v" } else { "--cache-type-k" };
        self.outcome(flag, cache_type(&given.cache_types))?;
        self.args.extend(after);
        Ok(())
    }
}

/// The flag without `=VALUE`.
fn name_of(flag: &str) -> &str {
    flag.split('=').next().unwrap_or(flag)
}

/// The command's flag of this name, `--name` or `-n`, if it has one.
fn own_flag<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    let long = flag.strip_prefix("--").filter(|name| !name.is_empty());
    let mut letters = flag.chars().skip(1);
    let short = letters.next().filter(|_| long.is_none() && letters.next().is_none());
    command.get_arguments().find(|arg| {
        let has_long =
            |name| arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|all| all.contains(&name));
        let has_short = |letter| arg.get_short() == Some(letter);
        long.is_some_and(has_long) || short.is_some_and(has_short)
    })
}
/// Whether `flag` is a group of one-letter flags without values (`-vx`), without `-h` and `-V`, which end the program.
/// Whether these are letters of flags without values, of which none ends the program.
fn is_cluster(command: &Command, flag: &str) -> bool {
    let one = |letter: char| {
        let own = own_flag(command, &format!("-{letter}"));
        own.is_some_and(|own| !own.get_action().takes_values() && !matches!(letter, 'h' | 'V'))
    };
    !flag.starts_with("--") && flag.chars().skip(1).all(one)
}

/// A tip for a flag of several letters with one dash (`-temp`) that clap would misread as one-letter flags: the flag has
/// two dashes, or its first letter is no flag or shows the help.
fn misread(command: &Command, flag: &str) -> Option<String> {
    let name = name_of(flag);
    let word = name.strip_prefix('-').filter(|word| !word.starts_with('-') && word.chars().count() > 1)?;
    if word.contains(char::is_whitespace) {
        return Some("a text that begins with a dash comes after --".to_owned());
    }
    let with_two = format!("-{name}");
    if own_flag(command, &with_two).is_some() || find_flag(command.get_name(), &with_two).is_some() {
        return Some(format!("flags of several letters have two dashes: {with_two}"));
    }
    let letter = word.chars().next()?;
    match own_flag(command, &format!("-{letter}")) {
        // A value right after the letter, as in -n5.
        Some(own) if own.get_action().takes_values() => None,
        _ if is_cluster(command, name) => None,
        _ => Some(format!("there is no flag {name}; `metal-attention {} --help` shows all", command.get_name())),
    }
}

/// The error for a flag that is not supported.
fn refused(command: &mut Command, flag: &str, tip: &str) -> clap::Error {
    with_tip(command, ErrorKind::UnknownArgument, ContextKind::InvalidArg, flag, tip)
}

/// The error for a command that does not exist.
fn no_such_command(cli: &mut Command, name: &str, tip: &str) -> clap::Error {
    with_tip(cli, ErrorKind::InvalidSubcommand, ContextKind::InvalidSubcommand, name, tip)
}

/// An error of clap with a tip. `what` is the kind of `name`.
fn with_tip(command: &mut Command, kind: ErrorKind, what: ContextKind, name: &str, tip: &str) -> clap::Error {
    let mut error = clap::Error::new(kind).with_cmd(command);
    error.insert(what, ContextValue::String(name.to_owned()));
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip.to_owned())]));
    error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    error
}

/// `error`, with a tip if `args` contain a model name or a text where clap expected none.
fn advised(mut error: clap::Error, args: &[OsString]) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let named = text(ContextKind::InvalidArg);
    // An argument that is not a flag and was not expected is most likely a text or a model.
    let stray = match error.kind() {
        ErrorKind::UnknownArgument if !named.starts_with('-') => named,
        ErrorKind::InvalidValue if named == "[-]" => text(ContextKind::InvalidValue),
        ErrorKind::InvalidSubcommand => text(ContextKind::InvalidSubcommand),
        _ => return error,
    };
    let command = args.iter().skip(1).filter_map(|arg| arg.to_str()).find(|arg| !arg.starts_with('-')).unwrap_or("");
    let tip = if is_model(stray) {
        if stray == command {
            format!("a command comes first: metal-attention run {stray}")
        } else {
            format!("a model is named with -m: metal-attention {command} -m {stray}")
        }
    } else if matches!(command, "tokenize" | "logits" | "perplexity" | "compare" | "imatrix") {
        format!("a text is given with -p: metal-attention {command} -p {stray:?}")
    } else {
        return error;
    };
    if error.kind() == ErrorKind::InvalidValue {
        // clap would print the possible value "-" (stdin), which is no help to a user who gave a text.
        let mut other = clap::Error::new(ErrorKind::UnknownArgument).with_cmd(&Cli::command());
        other.insert(ContextKind::InvalidArg, ContextValue::String(stray.to_owned()));
        if let Some(usage) = error.get(ContextKind::Usage) {
            other.insert(ContextKind::Usage, usage.clone());
        }
        error = other;
    }
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    error
}

/// Whether `text` looks like the name of a model: an address, a GGUF file, or a well-known name.
fn is_model(text: &str) -> bool {
    is_hub_address(text) || without_ending(text).len() < text.len() || known_model(text).is_some()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::foreign_flags::FOREIGN_FLAGS;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Adds `command` and all its subcommands to `found`, by name.
    fn all(command: &Command, name: &str, found: &mut BTreeMap<String, Command>) {
        for sub in command.get_subcommands() {
            all(sub, format!("{name} {}", sub.get_name()).trim(), found);
        }
        found.insert(name.to_owned(), command.clone());
    }

    #[test]
    fn help_is_wrapped_once() {
        let mut commands = BTreeMap::new();
        let mut cli = Cli::command();
        cli.build();
        all(&cli, "", &mut commands);
        assert!(commands.len() > 18, "{:?}", commands.keys());
        for (name, command) in commands {
            // Two lines of prose in a row would have been wrapped by hand.
            let whole = command.clone().max_term_width(0).term_width(0).render_long_help().to_string();
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<_> = after.lines().collect();
            for pair in lines.windows(2) {
                let prose = pair.iter().all(|line| !line.is_empty() && !line.starts_with(' '));
                assert!(!prose, "{name}: wrapped by hand: {pair:?}");
            }
            assert!(whole.contains(after.trim_end()), "{name}");
            for width in [60, 80, 100, 120, 200] {
                let text = command.clone().term_width(width.min(120)).render_long_help().to_string();
                // clap never wraps the usage line.
                for line in text.lines().filter(|line| !line.starts_with("Usage:")) {
                    let long_word = line.split_whitespace().any(|word| word.len() > width - 12);
                    assert!(line.chars().count() <= width.min(120) || long_word, "{name} at {width}: {line}");
                }
            }
        }
    }

    fn arguments(line: &str) -> Vec<OsString> {
        format!("metal-attention {line}").split(' ').map(OsString::from).collect()
    }

    /// The rewritten command line without the program's name, followed by the ignored flags, each after a bar.
    #[track_caller]
    fn becomes(line: &str) -> String {
        let RewrittenArgs { args, notes } = rewrite(&arguments(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
        let args: Vec<_> = args[1..].iter().map(|arg| arg.to_str().unwrap()).collect();
        let names: Vec<_> = notes.iter().map(|note| note.split(" is passed over: ").next().unwrap()).collect();
        [vec![args.join(" ")], names.into_iter().map(str::to_owned).collect()].concat().join(" | ")
    }

    #[test]
    fn flags_of_other_programs_are_rewritten() {
        for (line, expected) in [
            ("run -hf a/b -p x", "run --model hf:a/b -p x"),
            ("run -p x -hf=a/b:Q8_0", "run --model hf:a/b:Q8_0 -p x"),
            ("serve -hfr a/b -hff c.gguf", "serve --model hf:a/b:c.gguf"),
            ("run -hf hf.co/a/b x", "run --model hf.co/a/b x"),
            (
                "chat -mu https://huggingface.co/a/b/blob/main/c.gguf",
                "chat --model https://huggingface.co/a/b/blob/main/c.gguf",
            ),
            ("run -ngl 0 -p x", "run --device cpu -p x"),
            ("run -ngl=0 -p x", "run --device cpu -p x"),
            ("run --n-gpu-layers=99 -p x", "run -p x | --n-gpu-layers"),
            ("run -ngl all -p x", "run -p x | -ngl"),
            ("run -ngl -1 -p x", "run -p x | -ngl"),
            ("tokenize -ngl 0 -p x", "tokenize -p x | -ngl"),
            ("run -dev CUDA1 x", "run --device cuda:1 x"),
            ("run -dev Vulkan0 x", "run --device gpu:0 x"),
            ("run -dev none x", "run --device cpu x"),
            ("run -fa x", "run x | -fa"),
            ("run -fa on x", "run x | -fa"),
            ("run --flash-attn=off x", "run x | --flash-attn"),
            ("run -ctk f16 -ctv f16 x", "run --cache-type f16 x"),
            ("run -ctk f32 --cache-type-v f32 x", "run --cache-type f32 x"),
            ("run -ctk F16 x", "run --cache-type f16 x"),
            ("run -np 1 x", "run x | -np"),
            ("serve -np 2 -cb --metrics", "serve --parallel 2 | -cb | --metrics"),
            ("serve --parallel 2", "serve --parallel 2"),
            ("serve -a name -to 5", "serve --alias name --timeout 5"),
            ("serve --models-dir a --sleep-idle-seconds 60", "serve --models-dir a --keep-alive 60"),
            ("serve --models-autoload", "serve | --models-autoload"),
            ("launch codex -hf a/b -- -ngl 0", "launch --model hf:a/b codex -- -ngl 0"),
            ("run -ub 64 -b 2048 x", "run --ubatch-size 64 x | -b"),
            ("chat -sys Hi", "chat --system Hi"),
            ("run -cnv x", "run --chat x"),
            ("run -no-cnv x", "run --raw x"),
            ("chat -cnv --jinja --mlock --no-warmup", "chat | -cnv | --jinja | --mlock | --no-warmup"),
            ("run --color x", "run x | --color"),
            ("run --color off x", "run x | --color"),
            ("run -r Q: x", "run --stop Q: x"),
            ("run -bf x", "run --file x"),
            ("run --think --keepalive 5m x", "run --thinking true x | --keepalive"),
            ("run --think=false x", "run --thinking false x"),
            ("chat --think high -rea auto", "chat --thinking high | -rea"),
            ("run --reasoning-budget 0 x", "run --thinking false x"),
            ("run --reasoning-budget -1 x", "run x | --reasoning-budget"),
            (
                "bench -p 512 -n 128 -r 3 -d 0,64 -b 2048 -fa 1",
                "bench --seq-lengths 512 --gen-length 128 --iterations 3 --depth 0,64 | -b | -fa",
            ),
            ("bench -o json -mmp 0 --no-warmup", "bench --json --no-mmap --warmup 0"),
            ("bench roofline -ngl 0", "bench roofline --device cpu"),
            ("embed --embd-output-format json x", "embed --json x"),
            ("run --format json x", "run --json-schema {\"type\":\"object\"} x"),
            ("run -jf a.json -j {}", "run --json-schema-file a.json -j {}"),
            ("-v run -ngl 99 x", "-v run x | -ngl"),
            // The argument after a flag of this program is its value, and arguments after -- are text.
            ("run -p -ngl", "run -p -ngl"),
            ("run -x -- -ngl 0", "run -x -- -ngl 0"),
            ("run -n -1 -p -5 x", "run -n -1 -p -5 x"),
            ("run -n5 -c4096 x", "run -n5 -c4096 x"),
            ("run --temp=0 - ", "run --temp=0 - "),
            ("nonsense -ngl 0", "nonsense -ngl 0"),
        ] {
            let line = line.replace(" -x", "");
            assert_eq!(becomes(&line), expected.replace(" -x", ""), "{line}");
        }
    }

    #[test]
    fn flags_that_are_not_supported_are_named_with_a_tip() {
        for (line, flag, tip) in [
            ("run -ngl 12 x", "-ngl", "-ngl 0 is the CPU"),
            ("run -ngl", "-ngl", "a value follows this flag"),
            ("embed -md x.gguf x", "-md", "--model-draft"),
            ("embed --mmproj x.gguf", "--mmproj", "pictures"),
            ("run --lora x", "--lora", "merged"),
            ("run -ts 1,1", "-ts", "--tensor-parallel"),
            ("run -hff x.gguf", "-hff", "-hf OWNER/REPO"),
            ("run -ctk q8_0 -ctv q8_0 x", "--cache-type-k, --cache-type-v", "f16 or f32"),
            ("run -ctk f16 -ctv f32 x", "--cache-type-k, --cache-type-v", "in one format"),
            ("run -ctk f32 x", "--cache-type-k", "--cache-type f32"),
            ("run -np 4 x", "-np", "serve --parallel N"),
            ("run --reasoning-budget 64 x", "--reasoning-budget", "thinking_budget_tokens"),
            ("serve --reasoning-budget 0", "--reasoning-budget", "thinking_budget_tokens"),
            ("serve --temp 0.6", "--temp", "each request"),
            ("serve --models-preset a.ini", "--models-preset", "--config"),
            ("serve --models-max 2", "--models-max", "--models-memory"),
            ("run -\u{a0}x y", "-\u{a0}x", "comes after --"),
            ("bench -o sql", "-o", "--csv"),
            // One dash and several letters.
            ("run -temp 0", "-temp", "two dashes: --temp"),
            ("run -help", "-help", "two dashes: --help"),
            ("run -jinja", "-jinja", "two dashes: --jinja"),
            ("run -hx", "-hx", "there is no flag -hx"),
            ("run -vh", "-vh", "there is no flag -vh"),
            ("run -xyz 1", "-xyz", "there is no flag -xyz"),
            // No command.
            ("-hf a/b", "-hf", "a command comes first"),
            ("-m a.gguf -p x", "-m", "metal-attention run -m"),
        ] {
            let error = rewrite(&arguments(line)).expect_err(line);
            let text = error.to_string();
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::UnknownArgument, 2), "{line}: {text}");
            assert!(
                text.contains(&format!("unexpected argument '{flag}' found")) && text.contains(tip),
                "{line}: {text}"
            );
        }
        for (name, tip) in [("ps", "metal-attention list"), ("create", "Modelfiles"), ("stop", "Ctrl-C")] {
            let error = rewrite(&arguments(name)).unwrap_err();
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::InvalidSubcommand, 2), "{name}");
            assert!(error.to_string().contains(tip), "{error}");
        }
    }

    /// Every entry of the table, in every command that it is for, with sample values: clap accepts the rewritten command
    /// line, or the error has a tip.
    #[test]
    fn every_foreign_flag_has_a_meaning_in_every_command() {
        let mut cli = Cli::command();
        cli.build();
        let with_model = ["run", "chat", "serve", "info", "tokenize", "embed", "bench", "perplexity"];
        let required = |command: &str| match command {
            "quantize" => "quantize in out Q4_0".to_owned(),
            command => command.to_owned(),
        };
        for entry in FOREIGN_FLAGS {
            let commands = if entry.commands.is_empty() { &with_model[..] } else { entry.commands };
            for (command, flag) in
                commands.iter().flat_map(|command| entry.flags.iter().map(move |flag| (*command, *flag)))
            {
                let own = own_flag(cli.find_subcommand(command).unwrap(), flag).is_some();
                assert!(!own || entry.commands.is_empty(), "{command} {flag}: it is the command's own");
                let found = find_flag(command, flag).unwrap();
                if own || !std::ptr::eq(found, entry) {
                    continue;
                }
                let values: &[&str] = match entry.value {
                    FlagValue::Nothing => &[""],
                    FlagValue::Value => &["1", "0", "f16", "json", "none", "x"],
                    FlagValue::Maybe(values) => values,
                };
                for value in values {
                    let line = format!("{} {flag} {value}", required(command));
                    let error = match rewrite(&arguments(line.trim_end())) {
                        Ok(RewrittenArgs { args, .. }) => match Cli::try_parse_from(args) {
                            Ok(_) => continue,
                            // A value that this program's flag refuses.
                            Err(error) => {
                                assert!(matches!(entry.value, FlagValue::Value), "{line}: {error}");
                                assert!(
                                    matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation),
                                    "{line}: {error}"
                                );
                                continue;
                            }
                        },
                        Err(error) => error,
                    };
                    let refuses = !matches!(entry.meaning, FlagMeaning::Nothing(_) | FlagMeaning::Flag(_));
                    assert!(refuses && error.to_string().contains("tip: "), "{line}: {error}");
                }
            }
        }
    }
}
