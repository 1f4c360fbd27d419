//! Available memory, and the longest context that fits in it.

use metal_attention_model::{CacheGroups, Capacity, DEFAULT_UBATCH, ModelSpec, PAGE, SessionOptions};

use crate::engine::DEFAULT_N_CTX;
use crate::{EngineOptions, Model};

/// Available bytes of main memory: what the system reports as available, but no more than the control group of this
/// process may still use. `None` if the system does not report it, as other systems than Linux.
pub fn available_memory() -> Option<u64> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let kib = number_after(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let available = kib.saturating_mul(1024);
    Some(control_group_memory().map_or(available, |left| left.min(available)))
}

/// Returns freed memory that the allocator keeps to the system. After a model is dropped that is much, as its parts
/// were allocated on several threads. No effect with another allocator than glibc's.
pub fn give_back_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes no pointer, and may be called at any time on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes that the control group (version 2) of this process may still use. The group's file cache counts as available.
fn control_group_memory() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // In a container the process's own group is mounted as the root.
    let folders = [format!("/sys/fs/cgroup{own}"), "/sys/fs/cgroup".to_owned()];
    folders.iter().find_map(|folder| {
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok();
        let limit: u64 = read("memory.max")?.trim().parse().ok()?;
        let used: u64 = read("memory.current")?.trim().parse().ok()?;
        let file = read("memory.stat").and_then(|text| number_after(&text, "file")).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(file)))
    })
}

/// The number after `name`, in the line that begins with it.
fn number_after(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if words.next() == Some(name) { words.next()?.parse().ok() } else { None }
    })
}

impl EngineOptions {
    /// Bytes that `model` and its [`drafter`](Self::drafter) take with these options on a device with `free` free bytes: weights, KV
    /// caches and recurrent states. `None`: the device does not report its memory; a context that is left to the device is then the shortest
    /// one.
    pub fn memory_bytes(&self, model: &Model, free: Option<u64>) -> u64 {
        let weights = model.gguf().tensor_bytes();
        let sized = self.sized(model.spec(), free, weights);
        let n_ctx = sized.n_ctx_of(model);
        let n_cache = sized.n_cache.unwrap_or(n_ctx.saturating_mul(self.n_seq));
        weights
            .saturating_add(sized.cache_bytes(model.spec(), n_ctx, n_cache))
            .saturating_add(sized.drafter_bytes(n_ctx, Some(n_cache)))
    }

    /// Bytes of the [`drafter`](Self::drafter) if the target has a KV cache of `n_cache` tokens for sequences of at most `n_ctx`; `None`:
    /// `n_ctx` for each sequence.
    pub fn drafter_bytes(&self, n_ctx: usize, n_cache: Option<usize>) -> u64 {
        let n_cache = n_cache.unwrap_or(n_ctx.saturating_mul(self.n_seq));
        self.drafter.weights.saturating_add(self.drafter_cache_bytes(n_ctx, n_cache))
    }

    /// The part of [`drafter_bytes`](Self::drafter_bytes) that grows with the context: the KV caches.
    fn drafter_cache_bytes(&self, n_ctx: usize, n_cache: usize) -> u64 {
        let caches =
            self.drafter.caches.iter().map(|spec| self.cache_bytes(spec, n_ctx.min(spec.n_ctx_train), n_cache));
        caches.fold(0, u64::saturating_add)
    }

    /// These options, adjusted to a device with `free` free bytes of which the weights take `weights`, and those of the
    /// [`drafter`](Self::drafter) more. With
    /// [`long_context`](Self::long_context), the context is raised up to that of the training, as far as KV caches of
    /// that many tokens fit in half of the rest. Unchanged if `n_ctx` is set, `long_context` is not, or `free` is
    /// `None`.
    pub(crate) fn sized(&self, spec: &ModelSpec, free: Option<u64>, weights: u64) -> Self {
        let (None, Some(n_passes), Some(free)) = (self.n_ctx, self.long_context, free) else { return self.clone() };
        let n_train = Capacity::n_ctx_of(spec, spec.n_ctx_train);
        let least = n_train.min(DEFAULT_N_CTX);
        let wanted = self.n_cache.unwrap_or(least).max(n_train);
        let weights = weights.saturating_add(self.drafter.weights);
        let budget = (free / n_passes.max(1) as u64).saturating_sub(weights) / 2;
        let fits = |n_pages: usize| {
            let n_cache = n_pages * PAGE;
            let bytes = self.cache_bytes(spec, n_train, n_cache);
            bytes.saturating_add(self.drafter_cache_bytes(n_train, n_cache)) <= budget
        };
        // Binary search in pages: `fitting` fits (`least` is assumed to fit every device), `too_much` does not.
        let (mut fitting, mut too_much) = (least.div_ceil(PAGE), wanted.div_ceil(PAGE) + 1);
        while too_much - fitting > 1 {
            let middle = fitting + (too_much - fitting) / 2;
            if fits(middle) {
                fitting = middle;
            } else {
                too_much = middle;
            }
        }
        let n_cache = (fitting * PAGE).min(wanted.max(least));
        Self { n_ctx: Some(n_train.min(n_cache)), n_cache: Some(n_cache), ..self.clone() }
    }

    /// Bytes of a KV cache of `n_cache` tokens for sequences of at most `n_ctx`, with recurrent states and RoPE cos/sin
    /// tables.
    fn cache_bytes(&self, spec: &ModelSpec, n_ctx: usize, n_cache: usize) -> u64 {
        let options = self.session_options(n_ctx.min(n_cache), self.n_ubatch.unwrap_or(DEFAULT_UBATCH));
        let capacity = SessionOptions { n_cache: Some(n_cache), ..options }.capacity(spec);
        let groups = CacheGroups::new(spec, capacity);
        let table_bytes_per_position: u64 = spec.ropes().iter().map(|rope| 4 * rope.n_rot as u64).sum();
        groups
            .n_elements(spec)
            .saturating_mul(self.cache_type.bytes() as u64)
            .saturating_add(groups.states().map_or(0, |states| states.bytes()))
            .saturating_add(table_bytes_per_position.saturating_mul(capacity.n_positions() as u64))
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_model::ModelShape;

    use super::*;
    use crate::speculation::DrafterMemory;

    /// A Llama with a context of 128 Ki tokens.
    fn spec() -> ModelSpec {
        let metadata = ModelShape::custom("llama").unwrap().metadata();
        ModelSpec { n_ctx_train: 1 << 17, ..ModelSpec::from_metadata(&metadata).unwrap() }
    }

    /// The options of a server with four slots.
    fn four() -> EngineOptions {
        EngineOptions { n_cache: Some(4 * DEFAULT_N_CTX), n_seq: 68, long_context: Some(1), ..Default::default() }
    }

    #[test]
    fn a_whole_context_where_there_is_memory() {
        let spec = spec();
        let bytes = four().cache_bytes(&spec, 1 << 17, 1 << 17);
        let size = |options: EngineOptions, free: u64, weights| {
            let sized = options.sized(&spec, Some(free), weights);
            (sized.n_ctx, sized.n_cache)
        };
        let whole = (Some(1 << 17), Some(1 << 17));
        assert_eq!(size(four(), 2 * bytes, 0), whole);
        assert_eq!(size(four(), 2 * bytes + 5000, 5000), whole);
        // Two forward passes share the memory.
        assert_eq!(size(EngineOptions { long_context: Some(2), ..four() }, 4 * bytes, 0), whole);
        // One byte less: one page less.
        assert_eq!(size(four(), 2 * bytes - 2, 0), (Some((1 << 17) - PAGE), Some((1 << 17) - PAGE)));
        // Nothing left: the minimum.
        assert_eq!(size(four(), 5000, 5000), (Some(DEFAULT_N_CTX), Some(DEFAULT_N_CTX)));
        // More slots want more than one whole context.
        let many = EngineOptions { n_cache: Some(64 * DEFAULT_N_CTX), ..four() };
        assert_eq!(size(many, 1 << 50, 0), (Some(1 << 17), Some(64 * DEFAULT_N_CTX)));
    }

    #[test]
    fn drafters_take_a_part_of_the_memory() {
        let spec = spec();
        let cache = four().cache_bytes(&spec, 1 << 17, 1 << 17);
        let drafter = DrafterMemory { weights: 5000, caches: vec![spec.clone()] };
        let options = EngineOptions { drafter, ..four() };
        assert_eq!(options.drafter_cache_bytes(1 << 17, 1 << 17), cache);
        let n_ctx = |free| options.sized(&spec, Some(free), 7000).n_ctx;
        assert_eq!(n_ctx(4 * cache + 12_000), Some(1 << 17));
        assert_eq!(n_ctx(4 * cache + 11_998), Some((1 << 17) - PAGE));
        let model = Model::built_in().unwrap();
        let plain = EngineOptions { n_ctx: Some(512), n_cache: Some(2048), ..Default::default() };
        let caches = vec![model.spec().clone()];
        let drafted = EngineOptions { drafter: DrafterMemory { weights: 9, caches }, ..plain.clone() };
        let cache = plain.cache_bytes(model.spec(), 512, 2048);
        assert_eq!(drafted.memory_bytes(&model, None), plain.memory_bytes(&model, None) + 9 + cache);
    }

    #[test]
    fn explicit_sizes_stay() {
        let spec = spec();
        for options in [EngineOptions { n_ctx: Some(100), ..four() }, EngineOptions { long_context: None, ..four() }] {
            assert_eq!(options.sized(&spec, Some(1 << 50), 0), options);
        }
        let options = four();
        assert_eq!(options.sized(&spec, None, 0), options);
        // A short training context is the limit.
        let short = ModelSpec { n_ctx_train: 512, ..spec };
        let sized = EngineOptions { n_cache: Some(4 * 512), ..four() }.sized(&short, Some(1 << 50), 0);
        assert_eq!((sized.n_ctx, sized.n_cache), (Some(512), Some(4 * 512)));
    }

    #[test]
    fn memory_bytes_include_the_context_that_fits_the_device() {
        let model = Model::built_in().unwrap();
        let weights = model.gguf().tensor_bytes();
        let of = |n_ctx, n_cache| EngineOptions { n_ctx, n_cache: Some(n_cache), long_context: Some(1), ..four() };
        let bytes = |options: EngineOptions, free| options.memory_bytes(&model, free);
        let (short, long) = (bytes(of(Some(512), 512), None), bytes(of(Some(512), 2048), None));
        assert!(weights < short && short < long);
        let automatic = of(None, 2048);
        assert_eq!(bytes(automatic.clone(), Some(weights)), short);
        assert_eq!(bytes(automatic.clone(), Some(1 << 40)), long);
        assert_eq!(bytes(automatic, None), long);
    }

    #[test]
    fn numbers_of_system_files_are_read() {
        assert_eq!(number_after("MemTotal: 5 kB\nMemAvailable:    42 kB\n", "MemAvailable:"), Some(42));
        assert_eq!(number_after("file_mapped 1\nfile 7\n", "file"), Some(7));
        assert_eq!(number_after("MemTotal: 5 kB", "MemAvailable:"), None);
        assert_eq!(available_memory().is_some(), cfg!(target_os = "linux"));
    }
}
