//! Reports the load of the worker to Dynamo's router and metrics.

use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::{ComponentSnapshot, SnapshotPublisher};
use metal_attention::scheduler::{Metrics, Scheduler};

use crate::cache::RANK;

/// The time between two measurements of the load. Only changes are reported.
const INTERVAL: Duration = Duration::from_millis(100);

/// Reports the load until the task is aborted.
pub async fn publish(scheduler: Scheduler, publisher: Arc<SnapshotPublisher>) {
    let mut told = None;
    let mut before = scheduler.metrics();
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        interval.tick().await;
        let now = scheduler.metrics();
        let snapshot = snapshot(&before, &now);
        if told != Some(snapshot) {
            publisher.publish(RANK, snapshot);
            told = Some(snapshot);
        }
        before = now;
    }
}

/// The load at `now`: the pages of running requests and of the cache, and the share of prompt tokens since `before` that were in the
/// KV cache.
fn snapshot(before: &Metrics, now: &Metrics) -> ComponentSnapshot {
    let total = now.pages_used + now.pages_free;
    let cached = now.cached_tokens - before.cached_tokens;
    let prompts = cached + now.prompt_tokens - before.prompt_tokens;
    ComponentSnapshot {
        kv_used_blocks: now.pages_running as u64,
        kv_total_blocks: total as u64,
        gpu_cache_usage: now.pages_running as f32 / total.max(1) as f32,
        kv_cache_hit_rate: (prompts > 0).then(|| cached as f32 / prompts as f32),
        dp_rank: RANK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_that_of_running_requests() {
        let before = Metrics { prompt_tokens: 100, cached_tokens: 100, ..Default::default() };
        let metrics = |prompt_tokens, cached_tokens| Metrics {
            prompt_tokens,
            cached_tokens,
            pages_used: 30,
            pages_free: 10,
            pages_running: 4,
            ..Default::default()
        };
        let expected = ComponentSnapshot {
            kv_used_blocks: 4,
            kv_total_blocks: 40,
            gpu_cache_usage: 0.1,
            kv_cache_hit_rate: Some(0.75),
            dp_rank: 0,
        };
        assert_eq!(snapshot(&before, &metrics(110, 130)), expected);
        // No prompt was evaluated, so there is no hit rate.
        assert_eq!(snapshot(&before, &metrics(100, 100)), ComponentSnapshot { kv_cache_hit_rate: None, ..expected });
    }
}
