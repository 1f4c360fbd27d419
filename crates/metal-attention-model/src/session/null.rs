//! An executor without weights, for tests of everything above the backends.

use std::ops::Range;

use super::{Executor, LayerTrace, Step, StepLimits, StepResults};
use crate::{
    BatchToken, CacheBlock, CacheGroups, CacheLayout, DeviceInfo, ForwardError, Mask, MemoryUse, ModelSpec, PAGE,
    PageCopy, Profiler, Segment, Session, SessionOptions, Watch, argmax, highest,
};

/// Length of the lists of highest logits, and most sequences of decode steps that are submitted ahead.
const TOP_K: usize = 8;
const N_AHEAD: usize = 4;

/// A backend that computes hashes in place of a model: the logits after a token depend on all tokens of its sequence up to
/// it, read back from the KV pages and state slots that the session has assigned. So a wrong page, slot or copy changes
/// the results.
#[derive(Debug)]
pub struct NullExecutor {
    spec: ModelSpec,
    groups: CacheGroups,
    watch: Watch,
    /// The different masks of the layers, with their cache groups; first that of group 0, which keeps all positions. The hash of a
    /// token depends on them, and not on the groups, which also depend on the options.
    masks: Vec<(Mask, usize)>,
    /// The token ids in each page of each cache group, `[n_pages, PAGE]`.
    pages: Vec<Vec<u32>>,
    /// The hash of a sequence in each state slot, after the first; empty if no layer keeps a state.
    states: Vec<u64>,
    /// The ids that the last submitted decode step has chosen.
    chosen: Vec<u32>,
    /// Number of steps so far, those submitted ahead included.
    n_steps: usize,
}

impl NullExecutor {
    /// A session over a null executor for `spec`, with the capacity of `options`. `watch` cancels its steps.
    pub fn session(spec: ModelSpec, options: &SessionOptions, watch: Watch) -> Session<Self> {
        Session::new(Self::new(spec, options, watch))
    }

    /// A null executor for `spec`, with the capacity of `options`. `watch` cancels its steps.
    pub fn new(spec: ModelSpec, options: &SessionOptions, watch: Watch) -> Self {
        let groups = CacheGroups::new(&spec, options.capacity(&spec));
        let mut masks = vec![(Mask::Causal, 0)];
        for (i, layer) in spec.layers.iter().enumerate() {
            if let Some(attention) = layer.mixer.attention()
                && masks.iter().all(|(mask, _)| *mask != attention.mask)
            {
                masks.push((attention.mask, groups.of_layer(i)));
            }
        }
        let pages = groups.groups().iter().map(|group| vec![0; group.n_pages * PAGE]).collect();
        let states = vec![0; groups.states().map_or(0, |states| states.n_states + 1)];
        Self { spec, groups, watch, masks, pages, states, chosen: Vec::new(), n_steps: 0 }
    }

    /// Number of steps so far, those submitted ahead included.
    pub fn n_steps(&self) -> usize {
        self.n_steps
    }

    /// Stores `tokens`, and updates the states of `segments`. Returns the hash after each token.
    fn evaluate(&mut self, step: &Step, tokens: &[BatchToken], segments: &[Segment]) -> Vec<u64> {
        self.n_steps += 1;
        for (i, token) in tokens.iter().enumerate() {
            for (group, ids) in self.pages.iter_mut().enumerate() {
                let page = step.pages.page(group, token.seq, token.pos) as usize;
                ids[page * PAGE + token.pos % PAGE] = content(step, i, token, &self.spec);
            }
        }
        let mut hashes: Vec<_> = tokens.iter().map(|token| self.hash(step, token)).collect();
        for segment in segments {
            let mut state = self.states[segment.from as usize];
            for (token, hash) in tokens.iter().zip(&mut hashes) {
                if token.seq == segment.seq && (segment.pos..segment.pos + segment.n).contains(&token.pos) {
                    state = mix(state, u64::from(token.id));
                    *hash = mix(*hash, state);
                }
            }
            self.states[segment.to as usize] = state;
        }
        hashes
    }

    /// The hash of the tokens that `token` attends to with each mask.
    fn hash(&self, step: &Step, token: &BatchToken) -> u64 {
        let mut hash = step.position(token).0.iter().fold(token.pos as u64, |hash, &at| mix(hash, at.into()));
        // The first index of the token's block.
        let of_block = |first: &&BatchToken| step.has_blocks(&self.spec) && first.seq == token.seq;
        let block = step.tokens.iter().find(of_block).map(|first| first.pos);
        let span = step.inputs.as_ref().and_then(|inputs| inputs.of_token(token)).map(|(span, _)| span);
        for &(mask, group) in &self.masks {
            let mut seen = mask.seen(token.pos, token.pos + 1);
            let mut layers = self.spec.layers.iter();
            let layer = layers.position(|layer| layer.mixer.attention().is_some_and(|a| a.mask == mask));
            if let Some(span) = span.filter(|span| layer.is_some_and(|layer| span.is_bidirectional_in(layer))) {
                seen.end = span.indices.end;
            }
            if let Some(start) = block {
                seen = seen.start.min(start)..step.pages.n_past(token.seq);
            }
            for pos in seen {
                let page = step.pages.page(group, token.seq, pos) as usize;
                hash = mix(hash, u64::from(self.pages[group][page * PAGE + pos % PAGE]));
            }
        }
        hash
    }

    /// The logits of a hash, `[n_vocab]`.
    fn logits(&self, hash: u64) -> Vec<f32> {
        (0..self.spec.n_vocab as u64).map(|id| unit(mix(hash, id))).collect()
    }

    fn check(&self) -> Result<(), ForwardError> {
        if self.watch.is_cancelled() { Err(ForwardError::Cancelled) } else { Ok(()) }
    }
}

/// What a page holds of the input `token`, the `i`th of the step: the token's id, or a hash of the row or context row; with a
/// state, a hash of both.
fn content(step: &Step, i: usize, token: &BatchToken, spec: &ModelSpec) -> u32 {
    let hash_of = |rows: &[f32], i: usize, width: usize| {
        rows[i * width..][..width].iter().fold(0, |hash, x| mix(hash, x.to_bits().into())) as u32
    };
    if let Some(rows) = &step.context {
        return hash_of(rows, i, spec.n_embd);
    }
    let own = match step.inputs.as_ref().and_then(|inputs| inputs.of_token(token)) {
        None => token.id,
        Some((span, i)) => hash_of(&span.rows, i, spec.n_embd),
    };
    match &step.states {
        None => own,
        Some(states) => mix(own.into(), hash_of(states, i, spec.state_width()).into()) as u32,
    }
}

/// A number from -1 to 1 for a hash.
fn unit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// A hash of two numbers (the finaliser of `SplitMix64`).
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(5) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Executor for NullExecutor {
    type InFlight = Vec<u32>;

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        DeviceInfo { kind: "null", name: "no device".into(), driver: None, n_threads: 1 }
    }

    fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    fn limits(&self) -> StepLimits {
        StepLimits {
            n_tokens: self.groups.capacity().n_ubatch,
            n_outputs: 16,
            one_run_per_sequence: !self.states.is_empty(),
            chooses_ids: true,
            max_top_k: TOP_K,
            n_ahead: N_AHEAD,
        }
    }

    fn memory_use(&self, results: usize) -> MemoryUse {
        MemoryUse { weights: 0, kv_cache: self.cache_bytes() as u64, scratch: results as u64 }
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.check()
    }

    fn copy_page(&mut self, PageCopy { group, from, to }: PageCopy) -> Result<(), ForwardError> {
        let from = from as usize * PAGE;
        self.pages[group].copy_within(from..from + PAGE, to as usize * PAGE);
        Ok(())
    }

    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        let hashes = self.evaluate(step, &step.tokens, step.pages.segments(&step.tokens));
        if let Some(profiler) = profiler {
            profiler.begin_step(step.phase, step.tokens.len());
            profiler.lap("hash");
        }
        if let Some(mut trace) = trace {
            for &layer in trace.before {
                let row = |&hash: &u64| vec![unit(mix(hash, layer as u64)); self.spec.n_embd];
                trace.copy(layer, &step.tokens, &hashes.iter().flat_map(row).collect::<Vec<_>>());
            }
        }
        let outputs = step.tokens.iter().zip(&hashes).filter(|(token, _)| token.output);
        let rows: Vec<_> = outputs.map(|(_, &hash)| self.logits(hash)).collect();
        match results {
            StepResults::Logits(logits) => logits.copy_from_slice(&rows.concat()),
            StepResults::Hidden(states) => {
                for (state, row) in states.chunks_mut(self.spec.n_embd).zip(&rows) {
                    state.fill(row[0]);
                }
            }
            StepResults::Ids(ids) => ids.iter_mut().zip(&rows).for_each(|(id, row)| *id = argmax(row)),
            StepResults::TopK(lists) => lists.iter_mut().zip(&rows).for_each(|(list, row)| *list = highest(row, TOP_K)),
        }
        self.watch.advance((step.tokens.len() * self.spec.n_layer()) as u64);
        self.check()
    }

    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<Vec<u32>>, ForwardError> {
        ahead
            .map(|n| {
                let moved = step.tokens.iter().enumerate().map(|(i, token)| match n {
                    0 => *token,
                    n => BatchToken { id: self.chosen[i], pos: token.pos + n, ..*token },
                });
                let tokens: Vec<_> = moved.collect();
                let hashes = self.evaluate(step, &tokens, &step.pages.segments_ahead(&step.tokens, n));
                self.chosen = hashes.iter().map(|&hash| argmax(&self.logits(hash))).collect();
                Ok(self.chosen.clone())
            })
            .collect()
    }

    fn read(&mut self, step: Vec<u32>, ids: &mut [u32]) -> Result<bool, ForwardError> {
        self.check()?;
        ids.copy_from_slice(&step);
        self.watch.advance((ids.len() * self.spec.n_layer()) as u64);
        Ok(true)
    }

    fn cache_layout(&self) -> CacheLayout {
        let page_bytes = (PAGE * size_of::<u32>()) as u64;
        CacheLayout {
            format: "null".into(),
            page_bytes: vec![page_bytes; self.pages.len()],
            state_bytes: if self.states.is_empty() { 0 } else { size_of::<u64>() as u64 },
        }
    }

    fn cache_bytes(&self) -> usize {
        self.pages.iter().map(|ids| size_of_val(&ids[..])).sum::<usize>() + size_of_val(&self.states[..])
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        match block {
            CacheBlock::Page { group, page } => {
                let ids = &self.pages[group][page as usize * PAGE..][..PAGE];
                bytes.chunks_mut(size_of::<u32>()).zip(ids).for_each(|(to, id)| to.copy_from_slice(&id.to_le_bytes()));
            }
            CacheBlock::State { slot } => bytes.copy_from_slice(&self.states[slot as usize].to_le_bytes()),
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        match block {
            CacheBlock::Page { group, page } => {
                let (words, _) = bytes.as_chunks::<{ size_of::<u32>() }>();
                let ids = &mut self.pages[group][page as usize * PAGE..][..PAGE];
                ids.iter_mut().zip(words).for_each(|(id, word)| *id = u32::from_le_bytes(*word));
            }
            CacheBlock::State { slot } => {
                let (words, _) = bytes.as_chunks::<{ size_of::<u64>() }>();
                self.states[slot as usize] = u64::from_le_bytes(words[0]);
            }
        }
        Ok(())
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        Ok(Profiler::new("no device".into()))
    }
}
