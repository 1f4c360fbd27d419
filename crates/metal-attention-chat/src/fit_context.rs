//! Conversations longer than the context: their oldest turns are dropped.
//!
//! A turn is a message of the user with the messages of the assistant and of tools that follow it. System and developer
//! messages and the last turn stay.
//!
//! Clients that keep no state send the whole conversation again with each message. So the turns to drop depend on how much the
//! conversation exceeds the context, rounded up to steps: while it grows within a step the same turns are dropped, and the
//! prompt begins with what the KV cache has of the prompt before.

use std::borrow::Cow;

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use crate::{Message, Role};

/// A drop frees at least `1 / SHARE` of the context, and an answer is given at most that.
const SHARE: usize = 4;

/// How the context is shared out between a prompt and the answer to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextBudget {
    n_ctx: usize,
    n_answer: usize,
}

impl ContextBudget {
    /// Of a context of `n_ctx` tokens; an answer of `max_tokens` has room for all of them, or for a quarter of the context.
    pub fn new(n_ctx: usize, max_tokens: Option<usize>) -> Self {
        Self { n_ctx, n_answer: max_tokens.unwrap_or(usize::MAX).min(n_ctx / SHARE) }
    }

    /// Most tokens of the prompt.
    pub fn prompt(self) -> usize {
        self.n_ctx - self.n_answer
    }

    /// Tokens to drop of a prompt of `n_tokens`: those that there is no room for, rounded up to a step.
    pub fn n_to_drop(self, n_tokens: usize) -> usize {
        let step = (self.n_ctx / SHARE).max(1);
        n_tokens.saturating_sub(self.prompt()).next_multiple_of(step)
    }
}

/// Turns that the context had no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedTurns {
    /// How many.
    pub n_turns: usize,
    /// Their messages.
    pub n_messages: usize,
    /// Tokens by which the prompt is shorter without them.
    pub n_tokens: usize,
}

/// A conversation without the turns that the context has no room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FittedPrompt<'m, P> {
    /// The prompt, as it was rendered.
    pub prompt: P,
    /// Tokens of the prompt. More than there is room for where the messages that stay are too long.
    pub n_tokens: usize,
    /// The messages that are left.
    pub messages: Cow<'m, [Message]>,
    /// What was dropped; `None`: nothing.
    pub dropped: Option<DroppedTurns>,
}

/// Drops the oldest turns of a conversation until its prompt leaves room for the answer. `render` makes the prompt of messages and
/// counts its tokens; it runs once where the prompt has room, and seldom more than twice where it has not: which turns go is
/// decided by the tokens of their texts.
pub fn fit_context<'m, P, E>(
    messages: &'m [Message],
    room: ContextBudget,
    tokenizer: &Tokenizer,
    mut render: impl FnMut(&[Message]) -> Result<(P, usize), E>,
) -> Result<FittedPrompt<'m, P>, E> {
    let (mut prompt, n_whole) = render(messages)?;
    let (mut kept, mut n_tokens) = (Cow::Borrowed(messages), n_whole);
    let mut turns = OldTurns::new(messages, tokenizer);
    let mut goal = room.n_to_drop(n_whole);
    while n_tokens > room.prompt() && turns.drop_oldest() {
        while turns.n_tokens < goal && turns.drop_oldest() {}
        kept = Cow::Owned(turns.kept());
        (prompt, n_tokens) = render(&kept)?;
        // The template leaves out some of the dropped texts.
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

/// The turns of a conversation, of which the oldest may be dropped.
struct OldTurns<'a> {
    messages: &'a [Message],
    tokenizer: &'a Tokenizer,
    /// Where the turns begin, the last one too.
    begins: Vec<usize>,
    n_dropped: usize,
    /// Tokens of the texts of those that are dropped, and one for each message. A template adds marks of its own, so that the
    /// prompt gets shorter by more; it may leave thoughts out, which are not counted.
    n_tokens: usize,
}

impl<'a> OldTurns<'a> {
    fn new(messages: &'a [Message], tokenizer: &'a Tokenizer) -> Self {
        // What the assistant says before the user's first message is a turn, too.
        let first = messages.iter().position(is_of_turn);
        let begins = (0..messages.len()).filter(|&i| messages[i].role == Role::User || Some(i) == first).collect();
        Self { messages, tokenizer, begins, n_dropped: 0, n_tokens: 0 }
    }

    /// Drops one more turn. False: the last one is left.
    fn drop_oldest(&mut self) -> bool {
        let Some(&[begin, end]) = self.begins.get(self.n_dropped..self.n_dropped + 2) else { return false };
        let dropped = self.messages[begin..end].iter().filter(|message| is_of_turn(message));
        self.n_tokens += dropped.map(|message| 1 + self.count(message)).sum::<usize>();
        self.n_dropped += 1;
        true
    }

    /// Tokens of a message's texts.
    fn count(&self, message: &Message) -> usize {
        let options = EncodeOptions { add_special: false, parse_special: false };
        let calls = message.tool_calls.iter().flat_map(|call| [&*call.function.name, &*call.function.arguments]);
        [message.text()].into_iter().chain(calls).map(|text| self.tokenizer.encode(text, options).len()).sum()
    }

    /// The messages that are left.
    fn kept(&self) -> Vec<Message> {
        let begin = self.begins[self.n_dropped];
        let (old, left) = self.messages.split_at(begin);
        old.iter().filter(|message| !is_of_turn(message)).chain(left).cloned().collect()
    }
}

/// Whether a message goes with its turn.
fn is_of_turn(message: &Message) -> bool {
    match message.role {
        Role::User | Role::Assistant | Role::Tool => true,
        Role::System | Role::Developer => false,
    }
}
