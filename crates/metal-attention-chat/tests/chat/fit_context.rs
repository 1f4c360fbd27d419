//! `fit_context`, which drops the oldest turns of a conversation that exceeds the context.

use std::convert::Infallible;

use metal_attention_chat::{
    ContextBudget, DroppedTurns, FittedPrompt, Message, Role, ToolCall, fit_context, picture_marker,
};
use metal_attention_gguf::{Metadata, StringArray};
use metal_attention_tokenizer::{Tokenizer, TokenizerOptions};

/// A tokenizer with a token for each letter.
fn tokenizer() -> Tokenizer {
    let letters: Vec<String> = (b'a'..=b'z').map(|letter| char::from(letter).to_string()).collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", letters.iter().map(String::as_str).collect::<StringArray>());
    metadata.set("tokenizer.ggml.token_type", vec![1; letters.len()]);
    metadata.set("tokenizer.ggml.merges", StringArray::default());
    Tokenizer::from_metadata(&metadata, &TokenizerOptions::default()).unwrap()
}

/// The tokens of a prompt: the messages' texts, with two tokens around each.
fn tokens(messages: &[Message]) -> usize {
    messages.iter().map(|message| message.text().len() + 2).sum()
}

/// Fits `messages` into a context of `n_ctx` tokens. Returns the prompt and the number of renderings.
fn fitted(messages: &[Message], n_ctx: usize, max_tokens: Option<usize>) -> (FittedPrompt<'_, ()>, usize) {
    let mut n_renders = 0;
    let render = |messages: &[Message]| {
        n_renders += 1;
        Ok::<_, Infallible>(((), tokens(messages)))
    };
    let Ok(fitted) = fit_context(messages, ContextBudget::new(n_ctx, max_tokens), &tokenizer(), &[], render);
    (fitted, n_renders)
}

/// A text of `n` tokens.
fn text(n: usize) -> String {
    "a".repeat(n)
}

/// A system message of 10 tokens in the prompt, and `n` turns of 20 tokens each.
fn turns(n: usize) -> Vec<Message> {
    let turn = |_| [Message::user(text(8)), Message::assistant(text(8))];
    [Message::system(text(8))].into_iter().chain((0..n).flat_map(turn)).collect()
}

#[test]
fn a_conversation_that_fits_is_unchanged() {
    let messages = turns(3);
    let (fitted, n_renders) = fitted(&messages, 100, Some(30));
    assert_eq!((fitted.n_tokens, fitted.dropped, n_renders), (70, None, 1));
    assert_eq!(*fitted.messages, *messages);
}

#[test]
fn whole_turns_are_dropped_and_instructions_stay() {
    let call = Message { tool_calls: vec![ToolCall::new("c", "find", text(6))], ..Message::assistant("") };
    let messages = [
        Message::system(text(3)),
        Message::user(text(10)),
        call.clone(),
        Message::new(Role::Tool, text(20)),
        Message::new(Role::Developer, text(3)),
        Message::assistant(text(10)),
        Message::user(text(10)),
        call,
        Message::new(Role::Tool, text(5)),
    ];
    let (fitted, n_renders) = fitted(&messages, 80, None);
    let left = [&messages[0], &messages[4], &messages[6], &messages[7], &messages[8]];
    assert_eq!(fitted.messages.iter().collect::<Vec<_>>(), left);
    assert_eq!(fitted.dropped, Some(DroppedTurns { n_turns: 1, n_messages: 4, n_tokens: 48 }));
    assert_eq!((fitted.n_tokens, n_renders), (31, 2));
}

#[test]
fn the_dropped_turns_stay_the_same_while_a_conversation_grows() {
    // 100 of 400 tokens are reserved for the answer. Turns, which count 18 tokens, are dropped in steps of 100 tokens.
    let dropped: Vec<usize> = (1..40)
        .map(|n| {
            let messages = turns(n);
            let (fitted, n_renders) = fitted(&messages, 400, None);
            assert!(fitted.n_tokens <= 300 && n_renders <= 2, "{fitted:?}");
            fitted.dropped.map_or(0, |dropped| dropped.n_turns)
        })
        .collect();
    let expected = [(14, 0), (5, 6), (5, 12), (5, 17), (5, 23), (5, 28)];
    let expected: Vec<usize> = expected.iter().flat_map(|&(times, n)| std::iter::repeat_n(n, times)).collect();
    assert_eq!(dropped, expected);
}

#[test]
fn the_last_turn_is_never_dropped() {
    let last = [Message::user(text(500)), Message::assistant(text(9))];
    let messages: Vec<Message> = turns(2).into_iter().chain(last).collect();
    let (cut, _) = fitted(&messages, 400, None);
    assert_eq!((cut.n_tokens, cut.messages.len()), (10 + 502 + 11, 3));
    // A conversation without a user's message, and an empty one.
    let alone = [Message::assistant(text(500)), Message::assistant(text(9))];
    assert_eq!(fitted(&alone, 400, None).0.dropped, None);
    assert_eq!(fitted(&[], 0, None).0.dropped, None);
    // Messages of the assistant before the first user's message count as a turn.
    let greeting: Vec<Message> = [Message::assistant(text(400))].into_iter().chain(turns(2)).collect();
    let (cut, _) = fitted(&greeting, 400, None);
    assert_eq!(cut.dropped, Some(DroppedTurns { n_turns: 1, n_messages: 1, n_tokens: 402 }));
}

/// If the template shortens old messages, the token counts overestimate them, and further turns are dropped until the prompt
/// fits.
#[test]
fn more_turns_are_dropped_if_the_template_shortens_them() {
    let messages: Vec<Message> = (0..32).map(|_| Message::user(text(99))).collect();
    let mut lengths = Vec::new();
    let render = |messages: &[Message]| {
        lengths.push(messages.len());
        Ok::<_, Infallible>(((), messages.len() * 10))
    };
    let Ok(fitted) = fit_context(&messages, ContextBudget::new(160, Some(0)), &tokenizer(), &[], render);
    assert_eq!((fitted.n_tokens, lengths), (160, vec![32, 30, 28, 24, 16]));
}

#[test]
fn pictures_count_with_the_tokens_of_their_rows() {
    // Four turns, each with a picture of 30 rows.
    let mut messages: Vec<Message> = (0..4).map(|number| Message::user(picture_marker(number))).collect();
    messages.push(Message::user(text(8)));
    let render = |messages: &[Message]| {
        let n_pictures = messages.iter().filter(|message| message.text() != text(8)).count();
        Ok::<_, Infallible>(((), 30 * n_pictures + 8))
    };
    let budget = ContextBudget::new(120, Some(0));
    let Ok(fitted) = fit_context(&messages, budget, &tokenizer(), &[30; 4], render);
    // The excess of 8 tokens is rounded up to a quarter of the context: one picture.
    assert_eq!((fitted.n_tokens, fitted.dropped.map(|dropped| dropped.n_turns)), (98, Some(1)));
}
