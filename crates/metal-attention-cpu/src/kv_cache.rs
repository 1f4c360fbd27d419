//! The KV cache: keys and values of all positions, in F16 or F32, in pages of [`PAGE`] positions. The
//! [`PageTable`](metal_attention_model::PageTable) assigns pages to sequences; here are the pages' contents.
//!
//! The layout per layer, page and KV head:
//! - keys in groups of 16 positions, `[PAGE / 16, key_dim, 16]`, so that one vector contains one element of 16 keys and the
//!   scores of 16 positions need no sums across lanes;
//! - values as rows, `[PAGE, padded value_dim]`, padded with zeros to whole vectors.

use std::ops::Range;

use half::f16;
pub use metal_attention_model::CacheType;
use metal_attention_model::{KvShape, PAGE, PageCopy};

use crate::shared::SharedMut;
use crate::simd::{Kernel, LANES, Simd};

/// An element type of the KV cache: F16 or F32.
pub(crate) trait CacheElement: Copy + Default + Send + Sync + 'static {
    /// Loads 16 elements as floats.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Stores 16 floats, rounded to the nearest elements, ties to even.
    ///
    /// # Safety
    ///
    /// See [`load`](Self::load).
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F);
    /// Writes elements as little-endian bytes; `bytes` is as long as `elements` in bytes.
    fn to_bytes(elements: &[Self], bytes: &mut [u8]);
    /// Reads elements from the bytes of [`to_bytes`](Self::to_bytes).
    fn from_bytes(elements: &mut [Self], bytes: &[u8]);
}

impl CacheElement for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
        // SAFETY: as the trait requires; f16 is a transparent u16.
        unsafe { S::f_store_f16(p.cast(), x) }
    }
    fn to_bytes(elements: &[Self], bytes: &mut [u8]) {
        for (x, bytes) in elements.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = x.to_le_bytes();
        }
    }
    fn from_bytes(elements: &mut [Self], bytes: &[u8]) {
        for (x, &bytes) in elements.iter_mut().zip(bytes.as_chunks().0) {
            *x = Self::from_le_bytes(bytes);
        }
    }
}

impl CacheElement for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait requires.
        unsafe { S::f_load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
        // SAFETY: as the trait requires.
        unsafe { S::f_store(p, x) }
    }
    fn to_bytes(elements: &[Self], bytes: &mut [u8]) {
        for (x, bytes) in elements.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = x.to_le_bytes();
        }
    }
    fn from_bytes(elements: &mut [Self], bytes: &[u8]) {
        for (x, &bytes) in elements.iter_mut().zip(bytes.as_chunks().0) {
            *x = Self::from_le_bytes(bytes);
        }
    }
}

/// The length of a value row: `value_dim` rounded up to whole vectors.
pub(crate) fn padded(value_dim: usize) -> usize {
    value_dim.next_multiple_of(LANES)
}

/// The keys and values of one layer, of all pages.
pub(crate) struct LayerKvCache<E> {
    /// `[n_pages, n_head_kv, PAGE / 16, key_dim, 16]`
    keys: Vec<E>,
    /// `[n_pages, n_head_kv, PAGE, padded value_dim]`
    values: Vec<E>,
    layout: PageLayout,
    /// The cache group of the layer.
    group: usize,
}

/// A [`LayerKvCache`] that several threads write to. A page that is written to belongs to one sequence alone, and each token's
/// key and value are written by one thread.
pub(crate) struct SharedKvCache<'a, E> {
    /// `[n_pages, n_head_kv, PAGE / 16, key_dim, 16]`
    pub(crate) keys: SharedMut<'a, E>,
    /// `[n_pages, n_head_kv, PAGE, padded value_dim]`
    pub(crate) values: SharedMut<'a, E>,
    pub(crate) layout: PageLayout,
    /// The cache group of the layer.
    pub(crate) group: usize,
}

/// The shape of a layer's pages, from which the index of a key or value is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLayout {
    n_head_kv: usize,
    key_dim: usize,
    value_dim: usize,
}

impl<E: CacheElement> LayerKvCache<E> {
    /// A cache of `n_pages` zeroed pages for a layer of cache group `group`. `None` when there is not enough memory.
    pub(crate) fn new(group: usize, n_pages: usize, cached: KvShape) -> Option<Self> {
        let KvShape { n_head_kv, key_dim, value_dim } = cached;
        let layout = PageLayout { n_head_kv, key_dim, value_dim };
        Some(Self {
            keys: zeroed(n_pages.checked_mul(layout.keys_per_page())?)?,
            values: zeroed(n_pages.checked_mul(layout.values_per_page())?)?,
            layout,
            group,
        })
    }

    /// The cache for a forward pass on several threads.
    pub(crate) fn shared(&mut self) -> SharedKvCache<'_, E> {
        SharedKvCache {
            keys: SharedMut::new(&mut self.keys),
            values: SharedMut::new(&mut self.values),
            layout: self.layout,
            group: self.group,
        }
    }

    /// Copies a whole page; nothing where the copy is for another cache group.
    pub(crate) fn copy(&mut self, PageCopy { group, from, to }: PageCopy) {
        if group != self.group {
            return;
        }
        let (keys, values) = (self.layout.keys_per_page(), self.layout.values_per_page());
        let (from, to) = (from as usize, to as usize);
        self.keys.copy_within(from * keys..(from + 1) * keys, to * keys);
        self.values.copy_within(from * values..(from + 1) * values, to * values);
    }

    /// The cache group of the layer.
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Bytes of a page, keys and values.
    pub(crate) fn page_bytes(&self) -> usize {
        (self.layout.keys_per_page() + self.layout.values_per_page()) * size_of::<E>()
    }

    /// Copies a page to `bytes`, `page_bytes` long: the keys, then the values.
    pub(crate) fn read_page(&self, page: u32, bytes: &mut [u8]) {
        let (keys, values) = self.of_page(page);
        let (of_keys, of_values) = bytes.split_at_mut(keys.len() * size_of::<E>());
        E::to_bytes(&self.keys[keys], of_keys);
        E::to_bytes(&self.values[values], of_values);
    }

    /// Copies a page from the bytes of [`read_page`](Self::read_page).
    pub(crate) fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let (keys, values) = self.of_page(page);
        let (of_keys, of_values) = bytes.split_at(keys.len() * size_of::<E>());
        E::from_bytes(&mut self.keys[keys], of_keys);
        E::from_bytes(&mut self.values[values], of_values);
    }

    /// The index ranges of a page's keys and of its values.
    fn of_page(&self, page: u32) -> (Range<usize>, Range<usize>) {
        let of = |n: usize| page as usize * n..(page as usize + 1) * n;
        (of(self.layout.keys_per_page()), of(self.layout.values_per_page()))
    }

    /// Bytes of all pages.
    pub(crate) fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<E>()
    }
}

/// The kernel that writes one key and one value to the cache.
pub(crate) struct StoreKeyValue<'a, E> {
    /// `[key_dim]`, rotated.
    key: &'a [f32],
    /// `[value_dim]`
    value: &'a [f32],
    /// Element 0 of the key; the next elements follow at a distance of [`LANES`].
    key_out: *mut E,
    /// The value's row, `[padded(value_dim)]`.
    value_out: *mut E,
}

impl<'a, E: CacheElement> StoreKeyValue<'a, E> {
    /// The kernel for `key` and `value` of KV head `head` at position `pos`, which is in page `page`.
    ///
    /// # Safety
    ///
    /// `page` is a page of the cache, and no other thread accesses this position of it.
    pub(crate) unsafe fn new(
        cache: &SharedKvCache<'a, E>,
        page: u32,
        head: usize,
        pos: usize,
        key: &'a [f32],
        value: &'a [f32],
    ) -> Self {
        let layout = cache.layout;
        assert!(key.len() == layout.key_dim && value.len() == layout.value_dim, "a head's key and value");
        Self {
            key,
            value,
            key_out: cache.keys.at(layout.key_index(page, head, pos)),
            value_out: cache.values.at(layout.value_index(page, head, pos)),
        }
    }
}

impl<E: CacheElement> Kernel for StoreKeyValue<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: both targets lie in the cache and are accessed by this kernel alone; vectors lie inside the slices, or in the
        // padding of the value's row, which gets zeros.
        unsafe {
            for (i, key) in self.key.chunks(LANES).enumerate() {
                let mut k = [0.0; LANES];
                k[..key.len()].copy_from_slice(key);
                let mut lanes = [E::default(); LANES];
                E::store::<S>(lanes.as_mut_ptr(), S::f_load(k.as_ptr()));
                for (lane, x) in lanes.into_iter().take(key.len()).enumerate() {
                    *self.key_out.add((i * LANES + lane) * LANES) = x;
                }
            }
            for (i, value) in self.value.chunks(LANES).enumerate() {
                let mut v = [0.0; LANES];
                v[..value.len()].copy_from_slice(value);
                E::store::<S>(self.value_out.add(i * LANES), S::f_load(v.as_ptr()));
            }
        }
    }
}

impl PageLayout {
    /// Elements of a key.
    pub(crate) fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Elements of a value, without the padding.
    pub(crate) fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// Elements of a page's keys.
    pub(crate) fn keys_per_page(&self) -> usize {
        self.n_head_kv * PAGE * self.key_dim
    }

    /// Elements of a page's values.
    pub(crate) fn values_per_page(&self) -> usize {
        self.n_head_kv * PAGE * padded(self.value_dim)
    }

    /// Bytes of a page with elements of `element` bytes.
    pub(crate) fn page_bytes(cached: KvShape, element: usize) -> usize {
        let KvShape { n_head_kv, key_dim, value_dim } = cached;
        PAGE * n_head_kv * (key_dim + padded(value_dim)) * element
    }

    /// The index in `keys` of element 0 of the key at position `pos`, which is in page `page`; the next elements follow at a
    /// distance of [`LANES`].
    pub(crate) fn key_index(&self, page: u32, head: usize, pos: usize) -> usize {
        let row = head * PAGE + pos % PAGE / LANES * LANES;
        page as usize * self.keys_per_page() + row * self.key_dim + pos % LANES
    }

    /// The index in `values` of the value row at position `pos`, which is in page `page`.
    pub(crate) fn value_index(&self, page: u32, head: usize, pos: usize) -> usize {
        page as usize * self.values_per_page() + (head * PAGE + pos % PAGE) * padded(self.value_dim)
    }
}

/// Allocates `n` zeros with zeroed memory of the system, which is assigned page by page on first use: positions that are never
/// filled cost no memory. `None` when there is not enough.
pub(crate) fn zeroed<E: CacheElement>(n: usize) -> Option<Vec<E>> {
    let layout = std::alloc::Layout::array::<E>(n).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout has a size; zero bytes are the element 0.0; the box gets exactly this allocation.
    unsafe {
        let p = std::alloc::alloc_zeroed(layout).cast::<E>();
        (!p.is_null()).then(|| Box::from_raw(std::ptr::slice_from_raw_parts_mut(p, n)).into_vec())
    }
}
