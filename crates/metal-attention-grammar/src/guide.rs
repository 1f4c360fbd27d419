//! [`Guide`]: the constraint of one answer of a chat model. It combines a [`Grammar`] of the answer's text with rules
//! outside of that text: reasoning may come first, ends after a budget of tokens, and generation ends after the first
//! call.

use std::collections::VecDeque;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use metal_attention_chat::{AnswerEvent, ChatTemplate, HARMONY_ANSWER, ToolCallParser, ToolFormat};

use crate::Grammar;

/// Ends a message of reasoning and begins the next message, in gpt-oss's format.
const NEXT: &str = "<|end|><|start|>assistant";

/// The maximum number of line-break tokens between reasoning and text.
const MAX_BLANKS: usize = 4;

/// The restrictions of a [`Guide`].
pub struct GuideOptions<'a> {
    /// The chat template of the model.
    pub template: &'a ChatTemplate,
    /// The parser of the answer. It must have read the part of the answer that the prompt contains.
    pub parser: ToolCallParser,
    /// The grammar of the answer's text; `None`: any text.
    pub grammar: Option<Grammar>,
    /// The maximum number of reasoning tokens; `None`: no limit.
    pub budget: Option<usize>,
    /// Whether the answer ends after its first tool call.
    pub single_call: bool,
    /// Whether the answer may call tools.
    pub has_tools: bool,
    /// Whether the answer may begin with reasoning although the prompt does not begin any.
    pub may_begin_reasoning: bool,
}

/// The constraint of one answer. It masks the tokens that may come next.
pub struct Guide {
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// The bytes of an incomplete UTF-8 character.
    undecoded: Vec<u8>,
    grammar: Option<Grammar>,
    phase: ReasoningPhase,
    /// The number of reasoning tokens that are left; `None`: no limit.
    budget: Option<usize>,
    /// The text that is forced to end reasoning: the first time, and later times.
    ends: [String; 2],
    n_ended: usize,
    /// The tokens of line breaks, which models write between reasoning and text.
    blanks: Vec<u32>,
    /// The tokens that are forced next, in order.
    forced: VecDeque<u32>,
    single_call: bool,
    called: bool,
}

/// The state of the reasoning before the text that the grammar describes. `grammar` applies to the text only.
enum ReasoningPhase {
    /// Reasoning may begin: the next tokens may be its start marker, of which `written` has been generated.
    Possible {
        start: &'static str,
        written: Vec<u8>,
        /// Whether `written` is also a valid beginning of the text.
        is_text: bool,
        /// The grammar in its initial state, for the text after the reasoning.
        fresh: Grammar,
        /// The mask of the grammar for the next token.
        mask: Vec<u32>,
    },
    /// Reasoning is being generated. `fresh` is the grammar in its initial state.
    Reasoning { fresh: Grammar },
    /// Reasoning has ended. `n_left` line-break tokens may come before the text; `mask` is the grammar's mask for the
    /// next token.
    Blank { n_left: usize, mask: Vec<u32> },
    /// Reasoning is over, or cannot come.
    Closed,
}

impl Guide {
    /// Builds the constraint; `None` if `options` restrict nothing.
    pub fn new(tokenizer: &Arc<Tokenizer>, options: GuideOptions<'_>) -> Option<Self> {
        let GuideOptions { template, parser, grammar, budget, single_call, has_tools, may_begin_reasoning } = options;
        if grammar.is_none() && budget.is_none() && !single_call {
            return None;
        }
        let harmony = template.tool_format() == ToolFormat::Harmony;
        let markers = template.reasoning();
        let phase = match (markers, &grammar) {
            (Some(markers), Some(grammar)) if may_begin_reasoning && budget != Some(0) && !parser.is_reasoning() => {
                ReasoningPhase::Possible {
                    start: markers.start,
                    written: Vec::new(),
                    is_text: true,
                    fresh: grammar.clone(),
                    mask: Vec::new(),
                }
            }
            (Some(_) | None, _) => ReasoningPhase::Closed,
        };
        let ends = match (harmony, has_tools || grammar.is_some()) {
            (true, true) => [NEXT.to_owned(), NEXT.to_owned() + if grammar.is_some() { "" } else { HARMONY_ANSWER }],
            (true, false) => [NEXT.to_owned() + HARMONY_ANSWER, NEXT.to_owned() + HARMONY_ANSWER],
            (false, _) => [markers, markers].map(|markers| markers.map_or("", |markers| markers.end).to_owned()),
        };
        let plain = EncodeOptions { add_special: false, parse_special: false };
        let blanks = ["\n", "\n\n"].into_iter().flat_map(|text| tokenizer.encode(text, plain));
        let blanks = blanks.filter(|&id| spelling(tokenizer, id).iter().all(|byte| *byte == b'\n')).collect();
        let mut guide = Self {
            tokenizer: Arc::clone(tokenizer),
            parser,
            undecoded: Vec::new(),
            grammar,
            phase,
            budget,
            ends,
            n_ended: 0,
            blanks,
            forced: VecDeque::new(),
            single_call,
            called: false,
        };
        if harmony && budget == Some(0) && !has_tools && guide.grammar.is_none() && may_begin_reasoning {
            guide.force(HARMONY_ANSWER);
        }
        guide.end_reasoning();
        Some(guide)
    }

    /// Forces the tokens of `text` to come next.
    fn force(&mut self, text: &str) {
        self.forced.extend(encode_continuation(&self.tokenizer, text, true));
    }

    /// Forces the end of reasoning if its budget is used up.
    fn end_reasoning(&mut self) {
        if self.budget == Some(0) && self.forced.is_empty() && self.parser.is_reasoning() {
            let end = self.ends[self.n_ended.min(1)].clone();
            self.n_ended += 1;
            self.force(&end);
        }
    }

    /// Passes a token to the parser, with the text that it completes.
    fn read(&mut self, id: u32) {
        self.undecoded.extend_from_slice(self.tokenizer.token_bytes(id));
        let mut text = String::new();
        while !self.undecoded.is_empty() {
            match std::str::from_utf8(&self.undecoded) {
                Ok(all) => {
                    text += all;
                    self.undecoded.clear();
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text += &String::from_utf8_lossy(&self.undecoded[..valid]);
                    // An invalid sequence is replaced; an incomplete one waits for more bytes.
                    let Some(invalid) = error.error_len() else {
                        self.undecoded.drain(..valid);
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.undecoded.drain(..valid + invalid);
                }
            }
        }
        let events = self.parser.push_token(&self.tokenizer, id, &text);
        self.called |= events.iter().any(|event| matches!(event, AnswerEvent::CallEnd { .. }));
    }
}

/// The token ids of `text` as the continuation of another text. Some vocabularies put a blank before a text that is
/// encoded on its own; then `text` is covered greedily by the longest tokens. `parse_special`: control tokens that
/// `text` spells are encoded as such.
pub fn encode_continuation(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Vec<u32> {
    let whole = tokenizer.encode(text, EncodeOptions { add_special: false, parse_special });
    let spelled: Vec<u8> = whole.iter().flat_map(|&id| spelling(tokenizer, id)).copied().collect();
    if spelled == text.as_bytes() {
        return whole;
    }
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while !rest.is_empty() {
        let fits = (0..tokenizer.n_vocab() as u32).filter(|&id| {
            let spelling = tokenizer.token_bytes(id);
            !spelling.is_empty() && rest.starts_with(spelling)
        });
        let Some(longest) = fits.max_by_key(|&id| tokenizer.token_bytes(id).len()) else { return whole };
        rest = &rest[tokenizer.token_bytes(longest).len()..];
        ids.push(longest);
    }
    ids
}

/// The spelling of a token: its bytes, or the text of a control token.
fn spelling(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    match tokenizer.token_bytes(id) {
        [] => tokenizer.token_text(id).unwrap_or_default().as_bytes(),
        bytes => bytes,
    }
}

/// Sets the bit of token `id`.
fn set(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word |= 1 << (id % 32);
    }
}

/// Whether the bit of token `id` is set.
fn has(mask: &[u32], id: u32) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word & (1 << (id % 32)) != 0)
}

/// Sets the bits of all tokens of the vocabulary.
fn set_all(mask: &mut [u32], n_vocab: usize) {
    let whole = (n_vocab / 32).min(mask.len());
    mask[..whole].fill(u32::MAX);
    for id in whole * 32..n_vocab {
        set(mask, id as u32);
    }
}

impl Constraint for Guide {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        if let Some(&id) = self.forced.front() {
            set(mask, id);
            return Ok(());
        }
        let n_vocab = self.tokenizer.n_vocab();
        match &mut self.phase {
            ReasoningPhase::Closed => match &mut self.grammar {
                Some(grammar) => grammar.allowed(mask)?,
                None => set_all(mask, n_vocab),
            },
            ReasoningPhase::Blank { n_left, mask: of_grammar } => {
                if let Some(grammar) = &mut self.grammar {
                    grammar.allowed(mask)?;
                }
                of_grammar.clear();
                of_grammar.extend_from_slice(mask);
                if *n_left > 0 {
                    self.blanks.iter().for_each(|&id| set(mask, id));
                }
            }
            ReasoningPhase::Reasoning { .. } => {
                set_all(mask, n_vocab);
                for &id in self.tokenizer.end_of_generation() {
                    if let Some(word) = mask.get_mut(id as usize / 32) {
                        *word &= !(1 << (id % 32));
                    }
                }
            }
            ReasoningPhase::Possible { start, written, is_text, mask: of_grammar, .. } => {
                if let Some(grammar) = self.grammar.as_mut().filter(|_| *is_text) {
                    grammar.allowed(mask)?;
                }
                of_grammar.clear();
                of_grammar.extend_from_slice(mask);
                let rest = start.get(written.len()..).unwrap_or_default();
                if let Some(&id) = encode_continuation(&self.tokenizer, rest, true).first() {
                    set(mask, id);
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        let was_reasoning = self.parser.is_reasoning();
        let was_forced = self.forced.front() == Some(&id);
        if was_forced {
            self.forced.pop_front();
        }
        self.read(id);
        let phase = std::mem::replace(&mut self.phase, ReasoningPhase::Closed);
        match phase {
            ReasoningPhase::Closed => {
                if let Some(grammar) = &mut self.grammar {
                    grammar.accept(id)?;
                }
            }
            ReasoningPhase::Reasoning { fresh } => {
                if self.parser.is_reasoning() {
                    self.phase = ReasoningPhase::Reasoning { fresh };
                } else {
                    self.grammar = Some(fresh);
                    self.phase = ReasoningPhase::Blank { n_left: MAX_BLANKS, mask: Vec::new() };
                }
            }
            ReasoningPhase::Blank { n_left, mask } => match &mut self.grammar {
                Some(grammar) if has(&mask, id) => grammar.accept(id)?,
                Some(_) | None => self.phase = ReasoningPhase::Blank { n_left: n_left.saturating_sub(1), mask },
            },
            ReasoningPhase::Possible { start, mut written, is_text, fresh, mask } => {
                written.extend_from_slice(spelling(&self.tokenizer, id));
                let follows = is_text && has(&mask, id);
                if start.as_bytes() == written {
                    self.phase = ReasoningPhase::Reasoning { fresh };
                } else {
                    if let Some(grammar) = self.grammar.as_mut().filter(|_| follows) {
                        grammar.accept(id)?;
                    }
                    if start.as_bytes().starts_with(&written) {
                        self.phase = ReasoningPhase::Possible { start, written, is_text: follows, fresh, mask };
                    }
                }
            }
        }
        if was_reasoning && self.parser.is_reasoning() && !was_forced {
            self.budget = self.budget.map(|budget| budget.saturating_sub(1));
        }
        self.end_reasoning();
        Ok(())
    }

    fn is_complete(&self) -> bool {
        if self.single_call && self.called {
            return true;
        }
        matches!(self.phase, ReasoningPhase::Closed)
            && self.forced.is_empty()
            && self.grammar.as_ref().is_some_and(Constraint::is_complete)
    }

    fn forced(&mut self) -> Vec<u32> {
        if !self.forced.is_empty() {
            return self.forced.iter().copied().collect();
        }
        match (&self.phase, &mut self.grammar) {
            (ReasoningPhase::Closed, Some(grammar)) => grammar.forced(),
            // Another text than that of the grammar may come.
            (_, _) => Vec::new(),
        }
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        if !self.forced.is_empty() {
            return self.forced.iter().zip(ids).take_while(|(forced, id)| forced == id).count();
        }
        match (&self.phase, &mut self.grammar) {
            (ReasoningPhase::Closed, Some(grammar)) => grammar.n_allowed(ids),
            (_, _) => ids.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention_chat::{Message, RenderRequest, Tool};
    use serde_json::json;

    use super::*;
    use crate::GrammarCompiler;

    /// Generates an answer byte by byte. The model prefers the bytes of `preferred`; where its byte is not allowed, it
    /// takes the first allowed token.
    fn answer(tokenizer: &Tokenizer, mut guide: Guide, preferred: &str) -> String {
        let mut generated = Vec::new();
        while generated.len() < preferred.len() && !guide.is_complete() {
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            guide.allowed(&mut mask).unwrap();
            let allowed = || (0..tokenizer.n_vocab() as u32).filter(|&id| has(&mask, id));
            let preferred_id =
                allowed().find(|&id| tokenizer.token_bytes(id) == [preferred.as_bytes()[generated.len()]]);
            let id = preferred_id
                .or_else(|| allowed().next())
                .unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&generated)));
            guide.accept(id).unwrap();
            generated.extend_from_slice(tokenizer.token_bytes(id));
        }
        String::from_utf8(generated).unwrap()
    }

    fn template(name: &str) -> ChatTemplate {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../metal-attention-chat/tests/data/templates");
        ChatTemplate::new(&std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()).unwrap()
    }

    /// The answer of such a model with the template `name`. `change` sets the restrictions.
    fn generated(name: &str, preferred: &str, change: impl FnOnce(&GrammarCompiler, &mut GuideOptions<'_>)) -> String {
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let grammars = GrammarCompiler::new(&tokenizer);
        let template = template(name);
        let messages = [Message::user("Question?")];
        let request = RenderRequest { messages: &messages, add_generation_prompt: true, ..Default::default() };
        let prompt = template.render(&request).unwrap().text;
        let mut options = GuideOptions {
            template: &template,
            parser: template.answer_parser(&prompt, &[]),
            grammar: None,
            budget: None,
            single_call: false,
            has_tools: false,
            may_begin_reasoning: true,
        };
        change(&grammars, &mut options);
        answer(&tokenizer, Guide::new(&tokenizer, options).unwrap(), preferred)
    }

    #[test]
    fn reasoning_ends_with_its_budget() {
        let budget =
            |name: &str, preferred: &str, n: usize| generated(name, preferred, |_, options| options.budget = Some(n));
        let preferred = "<think>abcdefghijklmnopqrstuvwxyz";
        assert_eq!(budget("qwen3", preferred, 4), "<think>abcd</think>mnopqrstuvwxyz");
        assert_eq!(budget("qwen3.5", "abcdefghijklmnop", 0), "</think>ijklmnop");
        assert_eq!(budget("qwen3.5", "abcdefghijklmnop", 3), "abc</think>lmnop");
        assert_eq!(budget("qwen3", "No thoughts.", 0), "No thoughts.");
        let channel = "<|channel|>final<|message|>";
        assert_eq!(budget("gpt-oss", &"x".repeat(30), 0), format!("{channel}xxx"));
    }

    #[test]
    fn reasoning_may_precede_json() {
        let json = |name: &str, preferred: &str, budget: Option<usize>| {
            generated(name, preferred, |grammars, options| {
                let prompt = if options.parser.is_reasoning() { "<think>" } else { "" };
                options.grammar = Some(grammars.json_object(options.template, prompt).unwrap());
                options.budget = budget;
            })
        };
        for preferred in ["{\"a\":1}", "<think>\nHm.\n</think>\n\n{\"a\":1}", "<think></think>{\"a\":1}"] {
            assert_eq!(json("qwen3", preferred, None), preferred);
        }
        assert_eq!(json("qwen3.5", "Hm.\n</think>\n\n{\"a\":1}", None), "Hm.\n</think>\n\n{\"a\":1}");
        assert_eq!(json("qwen3", "<think>abcdefghijk{\"a\":1}", Some(3)), "<think>abc</think>{\"a\":1}");
        assert!(json("qwen3", "<think></think>{}", Some(0)).starts_with('{'));
        assert!(json("llama-3.1", "<think></think>{}", None).starts_with('{'));
    }

    #[test]
    fn an_answer_ends_with_its_first_call() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let tools = [Tool::try_from(tool).unwrap()];
        let preferred = "Well.<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"f\"}";
        let text = generated("qwen2.5", preferred, |_, options| {
            options.single_call = true;
            options.parser = options.template.answer_parser("", &tools);
        });
        assert!(preferred.starts_with(&text) && !text.contains("</tool_call><"), "{text}");
        assert!(text.starts_with("Well.<tool_call>{\"name\": \"f\", \"arguments\": {}}"), "{text}");
    }
}
