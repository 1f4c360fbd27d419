//! Shortens conversations that exceed the context: their oldest turns are dropped.
//!
//! A turn is a message of the user with the messages of the assistant and of tools that follow it. System and
//! developer messages, and the last turn, are always kept.
//!
//! Stateless clients send the whole conversation again with each message. To keep the prefix cache useful, the number
//! of tokens to drop is rounded up to steps of a quarter of the context: while the conversation grows within a step,
//! the same turns are dropped, and the prompt has the same prefix as the one before.

use std::borrow::Cow;

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use crate::pictures::pictures_in;
use crate::{Message, Role};

/// A step of dropped tokens is `1 / SHARE` of the context; the answer is given at most this share, too.
const SHARE: usize = 4;

/// The division of the context between a prompt and the answer to it, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextBudget {
    n_ctx: usize,
    n_answer: usize,
}

impl ContextBudget {
    /// Divides a context of `n_ctx` tokens. The answer gets `max_tokens`, but at most a quarter of the context;
    /// without `max_tokens` it gets that quarter.
    pub fn new(n_ctx: usize, max_tokens: Option<usize>) -> Self {
        Self { n_ctx, n_answer: max_tokens.unwrap_or(usize::MAX).min(n_ctx / SHARE) }
    }

    /// The maximum number of tokens of the prompt.
    pub fn prompt(self) -> usize {
        self.n_ctx - self.n_answer
    }

    /// The number of tokens to drop from a prompt of `n_tokens`: the excess, rounded up to a step.
    pub fn n_to_drop(self, n_tokens: usize) -> usize {
        let step = (self.n_ctx / SHARE).max(1);
        n_tokens.saturating_sub(self.prompt()).next_multiple_of(step)
    }
}

/// The turns that were dropped from a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedTurns {
    /// The number of turns.
    pub n_turns: usize,
    /// The number of messages in these turns.
    pub n_messages: usize,
    /// The number of tokens by which the prompt became shorter.
    pub n_tokens: usize,
}

/// A prompt that was shortened to fit the context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FittedPrompt<'m, P> {
    /// The prompt, as `render` returned it.
    pub prompt: P,
    /// The number of tokens of the prompt. It exceeds the budget if the messages that must be kept are too long.
    pub n_tokens: usize,
    /// The messages that were kept.
    pub messages: Cow<'m, [Message]>,
    /// The turns that were dropped; `None` if there are none.
    pub dropped: Option<DroppedTurns>,
}

/// Drops the oldest turns of a conversation until its prompt fits the budget. `render` renders messages to a prompt
/// and counts its tokens. It runs once if the prompt fits, and rarely more than twice otherwise: the turns to drop are
/// chosen by the tokens of their texts and pictures. `picture_tokens`: those of the pictures whose markers are in the texts,
/// by their numbers.
///
/// Returns the error of `render`, if any.
pub fn fit_context<'m, P, E>(
    messages: &'m [Message],
    budget: ContextBudget,
    tokenizer: &Tokenizer,
    picture_tokens: &[usize],
    mut render: impl FnMut(&[Message]) -> Result<(P, usize), E>,
) -> Result<FittedPrompt<'m, P>, E> {
    let (mut prompt, n_whole) = render(messages)?;
    let (mut kept, mut n_tokens) = (Cow::Borrowed(messages), n_whole);
    let mut turns = OldTurns::new(messages, tokenizer, picture_tokens);
    let mut goal = budget.n_to_drop(n_whole);
    while n_tokens > budget.prompt() && turns.drop_oldest() {
        while turns.n_tokens < goal && turns.drop_oldest() {}
        kept = Cow::Owned(turns.kept());
        (prompt, n_tokens) = render(&kept)?;
        // The template may not render all of the dropped texts, so the goal is raised.
        goal = turns.n_tokens.saturating_mul(2);
    }
    let dropped = DroppedTurns {
        n_turns: turns.n_dropped,
        n_messages: messages.len() - kept.len(),
        n_tokens: n_whole.saturating_sub(n_tokens),
    };
    let dropped = (dropped.n_turns > 0).then_some(dropped);
    Ok(FittedPrompt { prompt, n_tokens, messages: kept, dropped })
}

/// A conversation as a list of turns, of which the oldest are dropped one by one.
struct OldTurns<'a> {
    messages: &'a [Message],
    tokenizer: &'a Tokenizer,
    picture_tokens: &'a [usize],
    /// The index of the first message of each turn, the last turn included.
    begins: Vec<usize>,
    n_dropped: usize,
    /// The number of tokens in the texts of the dropped turns, plus one per message. The prompt becomes shorter by
    /// more, because the template adds marks to each message. Reasoning is not counted, because the template may leave
    /// it out.
    n_tokens: usize,
}

impl<'a> OldTurns<'a> {
    fn new(messages: &'a [Message], tokenizer: &'a Tokenizer, picture_tokens: &'a [usize]) -> Self {
        // Messages of the assistant before the first message of the user are a turn, too.
        let first = messages.iter().position(is_of_turn);
        let begins = (0..messages.len()).filter(|&i| messages[i].role == Role::User || Some(i) == first).collect();
        Self { messages, tokenizer, picture_tokens, begins, n_dropped: 0, n_tokens: 0 }
    }

    /// Drops the oldest turn that is left. Returns false if only the last turn is left.
    fn drop_oldest(&mut self) -> bool {
        let Some(&[begin, end]) = self.begins.get(self.n_dropped..self.n_dropped + 2) else { return false };
        let dropped = self.messages[begin..end].iter().filter(|message| is_of_turn(message));
        self.n_tokens += dropped.map(|message| 1 + self.count(message)).sum::<usize>();
        self.n_dropped += 1;
        true
    }

    /// The number of tokens in the texts and pictures of a message.
    fn count(&self, message: &Message) -> usize {
        let options = EncodeOptions { add_special: false, parse_special: false };
        let calls = message.tool_calls.iter().flat_map(|call| [&*call.function.name, &*call.function.arguments]);
        let texts = [message.text()].into_iter().chain(calls);
        let of_pictures =
            pictures_in(message.text(), self.picture_tokens.len()).map(|number| self.picture_tokens[number]);
        texts.map(|text| self.tokenizer.encode(text, options).len()).chain(of_pictures).sum()
    }

    /// The messages that are not dropped.
    fn kept(&self) -> Vec<Message> {
        let begin = self.begins[self.n_dropped];
        let (old, left) = self.messages.split_at(begin);
        old.iter().filter(|message| !is_of_turn(message)).chain(left).cloned().collect()
    }
}

/// Whether a message belongs to a turn and is dropped with it.
fn is_of_turn(message: &Message) -> bool {
    match message.role {
        Role::User | Role::Assistant | Role::Tool => true,
        Role::System | Role::Developer => false,
    }
}
