//! Compiles a template and runs it within limits, on a thread with a stack of known size. The stages are
//! `rewritten.rs` (source), `scan.rs` (limits), minijinja's parser, `checked.rs` (syntax tree) and minijinja's code
//! generator and interpreter.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use minijinja::machinery::{CodeGenerator, Instructions, Span, ast::Stmt, eval, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error};
use self_cell::self_cell;
use serde_json::{Map, Value as Json};

use crate::checked::Checker;
use crate::environment::environment;
use crate::error::with_causes;
use crate::measured::variables;
use crate::rewritten::rewritten;
use crate::scan::scan;
use crate::{TemplateError, TemplateLimit, meter};

/// The maximum size of a template in bytes. The largest published one has 20 KB.
const MAX_SOURCE: usize = 1 << 20;
/// The size of the thread's stack in bytes, several times what parsing and running need. Pages that are not touched
/// take no memory.
const STACK: usize = 32 << 20;

/// A compiled template.
#[derive(Debug)]
pub(crate) struct Program {
    /// The name of the template, for errors.
    name: &'static str,
    env: Environment<'static>,
    compiled: Compiled,
}

self_cell!(
    struct Compiled {
        owner: String,

        #[covariant]
        dependent: Code,
    }

    impl { Debug }
);

/// The compiled code of a template. It borrows from the source.
#[derive(Debug)]
struct Code<'s> {
    instructions: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
    /// The variables that the template reads.
    names: BTreeSet<&'s str>,
}

/// The reason why a source is not accepted as a template.
pub(crate) enum CompileError {
    Limit(TemplateLimit),
    Syntax(String),
}

impl CompileError {
    pub fn new(what: &str, span: Span) -> Self {
        Self::Syntax(format!("syntax error: {what} (in line {})", span.start_line))
    }
}

impl From<TemplateLimit> for CompileError {
    fn from(limit: TemplateLimit) -> Self {
        Self::Limit(limit)
    }
}

/// The syntax options that `transformers` uses.
pub(crate) fn syntax() -> SyntaxConfig {
    // These options are valid, so building them does not fail.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

impl Program {
    /// Compiles the template `source`. `name` is used in errors.
    pub fn compile(name: &'static str, source: &str) -> Result<Self, TemplateError> {
        let limit = |limit| TemplateError::Limit { template: name, limit };
        if source.len() > MAX_SOURCE {
            return Err(limit(TemplateLimit::Source { bytes: source.len(), limit: MAX_SOURCE }));
        }
        let compiled = on_large_stack(|| Compiled::try_new(rewritten(source), |s| compile(name, s)))?;
        let compiled = compiled.map_err(|error| match error {
            CompileError::Limit(exceeded) => limit(exceeded),
            CompileError::Syntax(message) => TemplateError::Syntax { message },
        })?;
        Ok(Self { name, env: environment(), compiled })
    }

    /// Whether the template reads a variable of this name.
    pub fn reads(&self, name: &str) -> bool {
        self.compiled.borrow_dependent().names.contains(name)
    }

    /// Renders the template with the variables `context`.
    pub fn run(&self, context: &Map<String, Json>) -> Result<String, TemplateError> {
        let run = || self.run_here(context).map_err(|error| TemplateError::of_rendering(self.name, &error));
        on_large_stack(run)?
    }

    /// Renders on the current thread, with its meter.
    fn run_here(&self, context: &Map<String, Json>) -> Result<String, Error> {
        let Code { instructions, blocks, .. } = self.compiled.borrow_dependent();
        let (root, bytes) = variables(context)?;
        meter::start(bytes);
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        eval(&self.env, instructions, root, blocks, &mut output, AutoEscape::None)?;
        drop(output);
        Ok(text)
    }
}

fn compile<'s>(name: &'static str, source: &'s str) -> Result<Code<'s>, CompileError> {
    scan(source)?;
    let parsed: Stmt<'s> = parse(source, name, syntax()).map_err(|error| CompileError::Syntax(with_causes(&error)))?;
    let mut generator = CodeGenerator::new(name, source);
    let mut checker = Checker::new();
    generator.compile_stmt(&checker.template(&parsed)?);
    let (instructions, blocks) = generator.finish();
    Ok(Code { instructions, blocks, names: checker.names })
}

/// Runs `work` on a thread with a stack large enough for the parser, the interpreter and the destructors of values,
/// given the limits of nesting.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, TemplateError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(TemplateError::Thread)?;
        let fault = |_| TemplateError::Render { message: "the template engine has a fault and stopped".into() };
        thread.join().map_err(fault)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checked::MAX_NESTING;
    use crate::operators::MAX_ATTRIBUTES;
    use crate::scan::{MAX_BLOCKS, MAX_LINE, MAX_NAME, MAX_TAG, SourceExtent};

    fn published() -> Vec<(String, String)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/templates");
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        files.map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap())).collect()
    }

    /// The limits' comments state these numbers.
    #[test]
    fn published_templates_are_far_below_the_limits() {
        let mut largest = SourceExtent::default();
        let (mut deepest, mut attributes) = (0, 0);
        for (name, source) in published() {
            let source = rewritten(&source);
            let Ok(extent) = scan(&source) else { panic!("{name}") };
            let mut checker = Checker::new();
            assert!(checker.template(&parse(&source, "", syntax()).unwrap()).is_ok(), "{name}");
            largest.line = largest.line.max(extent.line);
            largest.tag = largest.tag.max(extent.tag);
            largest.name = largest.name.max(extent.name);
            largest.blocks = largest.blocks.max(extent.blocks);
            deepest = deepest.max(checker.deepest);
            attributes = attributes.max(checker.attributes.len());
        }
        let found = [largest.line, largest.tag, largest.name, largest.blocks, deepest, attributes];
        assert_eq!(found, [1180, 52, 31, 12, 19, 10]);
        let limits = [MAX_LINE, MAX_TAG, MAX_NAME, MAX_BLOCKS, MAX_NESTING, MAX_ATTRIBUTES];
        assert!(found.iter().zip(limits).all(|(found, limit)| found * 6 < limit));
    }

    /// A conversation of 1 MiB, as one message and as many, takes a small part of the budget.
    #[test]
    fn published_templates_do_little_work() {
        for (texts, length) in [(1, 1 << 20), (255, 4 << 10)] {
            let text = "word\n ".repeat(length / 6);
            let message =
                |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": text});
            let messages: Vec<_> = (0..texts).map(message).collect();
            let context =
                json!({"messages": messages, "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>"});
            let context = context.as_object().unwrap();
            let (_, bytes) = variables(context).unwrap();
            for (name, source) in published() {
                let program = Program::compile("chat template", &source).unwrap();
                let Ok(rendered) = program.run_here(context) else { panic!("{name}") };
                assert!(rendered.len() > texts * text.len() / 2 || name.contains("python"), "{name}");
                // The test template "python" exercises features that others do not use.
                let most = if name.contains("python") { 25 } else { 9 };
                assert!(meter::work() < most * bytes, "{name}: {} for {bytes}", meter::work());
            }
        }
    }
}
