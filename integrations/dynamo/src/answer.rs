//! Converts the scheduler's events to the stream of outputs that Dynamo reads.

use std::time::Duration;

use dynamo_backend_common::{
    DynamoError, FinishReason as Finish, GenerateContext, LLMEngineOutput, StopReason, TopLogprob, chunk,
};
use futures::stream::BoxStream;
use metal_attention::scheduler::{Event, Events, FinishReason, TokenLogprobs};
use tokio::sync::watch;

use crate::error;

/// An item of the stream.
pub type StreamItem = Result<LLMEngineOutput, DynamoError>;

/// Counts a stream as long as it exists.
pub struct InFlight(watch::Sender<usize>);

impl InFlight {
    /// Adds a stream to the count.
    pub fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(count.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// The settings of a stream.
pub struct StreamOptions {
    /// Ids of tokens that end the text.
    pub stop_ids: Vec<u32>,
    /// The number of tokens before which these do not end the text.
    pub min_tokens: usize,
    /// For tests: the time that each token takes at least.
    pub token_delay: Duration,
    /// The count of streams, to which this one belongs.
    pub in_flight: InFlight,
}

/// The tokens of a request while they are generated. If Dynamo stops the request or drops the stream, the events are dropped and the
/// scheduler frees the slot.
///
/// The number of tokens is not reported at the end: after a migration this worker counts earlier tokens of the text as prompt. The
/// frontend counts both itself.
pub fn stream(mut events: Events, context: GenerateContext, options: StreamOptions) -> BoxStream<'static, StreamItem> {
    Box::pin(async_stream::stream! {
        let StreamOptions { stop_ids, min_tokens, token_delay, in_flight } = options;
        let _in_flight = in_flight;
        let mut n_tokens = 0;
        loop {
            let event = tokio::select! {
                biased;
                () = context.stopped() => None,
                () = context.killed() => None,
                event = next(&mut events, token_delay) => Some(event),
            };
            match event {
                None => {
                    yield Ok(LLMEngineOutput::cancelled());
                    return;
                }
                // No request has prompt log probabilities.
                Some(Event::Prompt(_)) => {}
                Some(Event::Token { id, logprobs, .. }) => {
                    n_tokens += 1;
                    let output = token(id, logprobs);
                    if n_tokens >= min_tokens && stop_ids.contains(&id) {
                        let stop_reason = Some(StopReason::Int(id.into()));
                        yield Ok(LLMEngineOutput { finish_reason: Some(Finish::Stop), stop_reason, ..output });
                        return;
                    }
                    yield Ok(output);
                }
                Some(Event::Done { reason, end_token, .. }) => {
                    yield end(reason, end_token.filter(|id| stop_ids.contains(id)));
                    return;
                }
                Some(Event::Failed(why)) => {
                    yield Err(error::failed(&why));
                    return;
                }
            }
        }
    })
}

/// The stream of a text that has all its tokens already: it was migrated after the last of them.
pub fn complete() -> BoxStream<'static, StreamItem> {
    Box::pin(futures::stream::iter([Ok(LLMEngineOutput::length())]))
}

/// The next event of a request, after the delay for tests.
async fn next(events: &mut Events, delay: Duration) -> Event {
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    // `recv` returns `None` only after the last event, at which the stream ends.
    events.recv().await.unwrap_or(Event::Failed(metal_attention::scheduler::RequestError::EngineFailed))
}

/// The output for a token, with its log probabilities if they were requested.
fn token(id: u32, logprobs: Option<TokenLogprobs>) -> LLMEngineOutput {
    let mut output = chunk::token(id);
    if let Some(TokenLogprobs { logprob, top, .. }) = logprobs {
        let of = |(rank, (token_id, logprob)): (u32, (u32, f32))| TopLogprob {
            rank,
            token_id,
            token: None,
            logprob: logprob.into(),
            bytes: None,
        };
        output.log_probs = Some(vec![logprob.into()]);
        output.top_logprobs = Some(vec![(1..).zip(top).map(of).collect()]);
    }
    output
}

/// The end of a text. `end_token` is the token that ended it, if the frontend knows its meaning.
fn end(reason: FinishReason, end_token: Option<u32>) -> StreamItem {
    match reason {
        FinishReason::EndOfText | FinishReason::StopString => {
            Ok(LLMEngineOutput { token_ids: end_token.into_iter().collect(), ..LLMEngineOutput::stop() })
        }
        FinishReason::Length | FinishReason::ContextFull => Ok(LLMEngineOutput::length()),
        // Only a shutdown cancels here: otherwise the stream would be dropped.
        FinishReason::Cancelled | FinishReason::Deadline => {
            Err(error::shut_down("the worker shut down before the text was finished"))
        }
    }
}
