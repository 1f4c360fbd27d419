//! Texts that must follow a JSON schema or a grammar, by llguidance.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{ChatTemplate, Tool};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::limits::{MAX_ALL_OF, MAX_NAME_PATTERNS, MAX_ONE_OF};
use crate::scheduler::Constraint;

/// White space between the parts of a JSON text: enough to be laid out, not enough to never end.
const JSON_SPACE: &str = r"( |\n[ \t]{0,32})?";

/// Makes constraints for one vocabulary.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// Built when the first constraint is asked for: it takes a moment and some memory.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Grammars {
    /// For the vocabulary of `tokenizer`.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        Self { tokenizer: Arc::clone(tokenizer), factory: OnceLock::new() }
    }

    /// Any JSON object.
    pub fn json_object(&self) -> Result<Grammar, String> {
        self.json_schema(&json!({"type": "object"}))
    }

    /// JSON that follows `schema`. An error says what about the schema cannot be followed.
    pub fn json_schema(&self, schema: &Value) -> Result<Grammar, String> {
        check_effort(schema)?;
        self.constraint(TopLevelGrammar::from_json_schema(with_bounded_space(schema)))
    }

    /// Calls of `tools` as `template` has the model write them, after its thoughts where `prompt` ends in some;
    /// `parallel`: one or several.
    pub fn calls(
        &self,
        template: &ChatTemplate,
        prompt: &str,
        tools: &[Tool],
        parallel: bool,
    ) -> Result<Grammar, String> {
        let bounded = |tool: &Tool| {
            let mut json = tool.as_value().clone();
            let any = json!({"type": "object"});
            let parameters = tool.parameters().unwrap_or(&any);
            check_effort(parameters)?;
            json["function"]["parameters"] = with_bounded_space(parameters);
            Tool::try_from(json).map_err(|e| e.to_string())
        };
        let tools = tools.iter().map(bounded).collect::<Result<Vec<_>, _>>()?;
        let thinking = template.begins_with_thoughts(prompt);
        let grammar = template.tool_format().grammar(&tools, parallel, thinking, Some(&self.tokenizer));
        self.constraint(TopLevelGrammar::from_lark(grammar))
    }

    fn constraint(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer)).as_ref().map_err(Clone::clone)?;
        let compile = || factory.create_parser(grammar).map(|parser| Matcher::new(Ok(parser)));
        let matcher = on_a_large_stack(compile)?.map_err(|e| e.to_string())?;
        Ok(Grammar { matcher })
    }
}

/// `schema` for texts that do not go on with white space for ever. What a request itself says about how its schema is
/// compiled is not followed.
fn with_bounded_space(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        object.insert("x-guidance".into(), json!({"whitespace_pattern": JSON_SPACE}));
    }
    schema
}

/// Refuses a schema whose size is in no proportion to the work that it makes.
fn check_effort(schema: &Value) -> Result<(), String> {
    let mut counts = [("patternProperties", MAX_NAME_PATTERNS, 0), ("allOf", MAX_ALL_OF, 0), ("oneOf", MAX_ONE_OF, 0)];
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(object) => {
                for (keyword, _, n) in &mut counts {
                    *n += match object.get(*keyword) {
                        Some(Value::Object(parts)) => parts.len(),
                        Some(Value::Array(parts)) => parts.len(),
                        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) | None => 0,
                    };
                }
                left.extend(object.values());
            }
            Value::Array(list) => left.extend(list),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    match counts.into_iter().find(|(_, most, n)| n > most) {
        Some((keyword, most, n)) => Err(format!("it has {n} parts in {keyword}; at most {most} are allowed")),
        None => Ok(()),
    }
}

/// Runs `work` with a stack for schemas that are long chains: compiling them calls itself for each link.
fn on_a_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    const STACK: usize = 64 << 20;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("schema".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(|e| format!("there is no thread for it: {e}"))?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// The trie of the vocabulary's spellings, and what llguidance makes of it.
fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let end = tokenizer.eos().or_else(|| tokenizer.end_of_generation().first().copied()).unwrap_or_default();
    let info = TokRxInfo::new(tokenizer.n_vocab() as u32, end);
    // The trie takes this byte, which is in no UTF-8 text, for the mark of a special token.
    let special = [TokTrie::SPECIAL_TOKEN_MARKER];
    let spelling = |id| match tokenizer.token_bytes(id) {
        [TokTrie::SPECIAL_TOKEN_MARKER, ..] => Vec::new(),
        [] => [&special, tokenizer.token_text(id).unwrap_or_default().as_bytes()].concat(),
        bytes => bytes.to_vec(),
    };
    let spellings: Vec<Vec<u8>> = (0..tokenizer.n_vocab() as u32).map(spelling).collect();
    let mut trie = TokTrie::from(&info, &spellings);
    if !tokenizer.end_of_generation().is_empty() {
        trie = trie.with_eos_tokens(tokenizer.end_of_generation());
    }
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// A grammar and how far a text has got in it.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
}

impl Constraint for Grammar {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| e.to_string())?;
        for (word, &allowed) in mask.iter_mut().zip(allowed.as_slice()) {
            *word = allowed;
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.matcher.consume_token(id).map_err(|e| e.to_string())
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }
}
