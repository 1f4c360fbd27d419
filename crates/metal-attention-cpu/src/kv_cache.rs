//! The KV cache: keys and values of every token so far, per layer, in pages of [`PAGE`] positions that the sequences'
//! [`PageTable`](metal_attention_model::PageTable) names.
//!
//! Per layer, page and KV head:
//! - keys in groups of 16 positions, `[PAGE / 16, key_dim, 16]`, so that one
//!   vector holds one element of 16 keys and scores need no horizontal sums;
//! - values as rows, `[PAGE, padded value_dim]`, padded to whole vectors.

use std::ops::Range;

use half::f16;
pub use metal_attention_model::CacheType;
use metal_attention_model::{KvShape, PAGE, PageCopy};

use crate::shared::SharedMut;
use crate::simd::{Kernel, LANES, Simd};

/// An element of the KV cache.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// 16 elements.
    ///
    /// # Safety
    ///
    /// `p` points to 16 elements; the CPU has the instruction set.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F;
    /// Stores the nearest elements to 16 numbers, even ones on ties.
    ///
    /// # Safety
    ///
    /// As for [`load`](Self::load).
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F);
    /// Writes elements to as many bytes as they have, little-endian.
    fn to_bytes(elements: &[Self], bytes: &mut [u8]);
    /// Reads elements back.
    fn from_bytes(elements: &mut [Self], bytes: &[u8]);
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks; f16 is a transparent u16.
        unsafe { S::f_load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
        // SAFETY: as the trait asks; f16 is a transparent u16.
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

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::F {
        // SAFETY: as the trait asks.
        unsafe { S::f_load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, x: S::F) {
        // SAFETY: as the trait asks.
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

/// Elements of a value row: `value_dim` rounded up to whole vectors.
pub(crate) fn padded(value_dim: usize) -> usize {
    value_dim.next_multiple_of(LANES)
}

/// Keys and values of one layer, all pages.
pub(crate) struct LayerCache<E> {
    keys: Vec<E>,
    values: Vec<E>,
    places: Places,
    /// The group of layers whose pages these are.
    group: usize,
}

/// A [`LayerCache`] in which several threads write, each the tokens of sequences of its own: a page that is written to
/// belongs to one sequence alone.
pub(crate) struct SharedCache<'a, E> {
    pub(crate) keys: SharedMut<'a, E>,
    pub(crate) values: SharedMut<'a, E>,
    pub(crate) places: Places,
    /// The group of layers whose pages these are.
    pub(crate) group: usize,
}

/// Where keys and values lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    n_head_kv: usize,
    key_dim: usize,
    value_dim: usize,
}

impl<E: Element> LayerCache<E> {
    /// A zeroed cache of the pages of `group`. `None` when there is no memory for it.
    pub(crate) fn new(group: usize, n_pages: usize, cached: KvShape) -> Option<Self> {
        let KvShape { n_head_kv, key_dim, value_dim } = cached;
        let places = Places { n_head_kv, key_dim, value_dim };
        Some(Self {
            keys: zeroed(n_pages.checked_mul(places.page_keys())?)?,
            values: zeroed(n_pages.checked_mul(places.page_values())?)?,
            places,
            group,
        })
    }

    pub(crate) fn shared(&mut self) -> SharedCache<'_, E> {
        SharedCache {
            keys: SharedMut::new(&mut self.keys),
            values: SharedMut::new(&mut self.values),
            places: self.places,
            group: self.group,
        }
    }

    /// Copies a whole page, where it is one of its group.
    pub(crate) fn copy(&mut self, PageCopy { group, from, to }: PageCopy) {
        if group != self.group {
            return;
        }
        let (keys, values) = (self.places.page_keys(), self.places.page_values());
        let (from, to) = (from as usize, to as usize);
        self.keys.copy_within(from * keys..(from + 1) * keys, to * keys);
        self.values.copy_within(from * values..(from + 1) * values, to * values);
    }

    /// The group of layers whose pages these are.
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Bytes of a page's keys and values.
    pub(crate) fn page_bytes(&self) -> usize {
        (self.places.page_keys() + self.places.page_values()) * size_of::<E>()
    }

    /// Copies the keys of a page, and then its values, to as many bytes.
    pub(crate) fn read_page(&self, page: u32, bytes: &mut [u8]) {
        let (keys, values) = self.of_page(page);
        let (of_keys, of_values) = bytes.split_at_mut(keys.len() * size_of::<E>());
        E::to_bytes(&self.keys[keys], of_keys);
        E::to_bytes(&self.values[values], of_values);
    }

    /// Copies them back.
    pub(crate) fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let (keys, values) = self.of_page(page);
        let (of_keys, of_values) = bytes.split_at(keys.len() * size_of::<E>());
        E::from_bytes(&mut self.keys[keys], of_keys);
        E::from_bytes(&mut self.values[values], of_values);
    }

    /// Where the keys and the values of a page lie.
    fn of_page(&self, page: u32) -> (Range<usize>, Range<usize>) {
        let of = |n: usize| page as usize * n..(page as usize + 1) * n;
        (of(self.places.page_keys()), of(self.places.page_values()))
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<E>()
    }
}

/// Writes one key and one value into the cache.
pub(crate) struct StoreKeyValue<'a, E> {
    /// `[key_dim]`, rotated.
    key: &'a [f32],
    /// `[value_dim]`
    value: &'a [f32],
    /// Element 0 of the key; further elements follow at a distance of [`LANES`].
    key_out: *mut E,
    /// The value's row, `[padded(value_dim)]`.
    value_out: *mut E,
}

impl<'a, E: Element> StoreKeyValue<'a, E> {
    /// `key` and `value` for KV head `head` of the position `pos`, which is in page `page`.
    ///
    /// # Safety
    ///
    /// `page` is a page of the cache, and nobody else uses this position of it.
    pub(crate) unsafe fn new(
        cache: &SharedCache<'a, E>,
        page: u32,
        head: usize,
        pos: usize,
        key: &'a [f32],
        value: &'a [f32],
    ) -> Self {
        let places = cache.places;
        assert!(key.len() == places.key_dim && value.len() == places.value_dim, "a head's key and value");
        Self {
            key,
            value,
            key_out: cache.keys.at(places.key_at(page, head, pos)),
            value_out: cache.values.at(places.value_at(page, head, pos)),
        }
    }
}

impl<E: Element> Kernel for StoreKeyValue<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: both places lie in the cache and are this kernel's own; vectors lie inside the slices, or in the padding
        // of the value's row, where zeros are.
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

impl Places {
    pub(crate) fn key_dim(&self) -> usize {
        self.key_dim
    }

    pub(crate) fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// Elements of a page's keys.
    pub(crate) fn page_keys(&self) -> usize {
        self.n_head_kv * PAGE * self.key_dim
    }

    /// Elements of a page's values.
    pub(crate) fn page_values(&self) -> usize {
        self.n_head_kv * PAGE * padded(self.value_dim)
    }

    /// Bytes of a page for elements of so many bytes.
    pub(crate) fn page_bytes(cached: KvShape, element: usize) -> usize {
        let KvShape { n_head_kv, key_dim, value_dim } = cached;
        PAGE * n_head_kv * (key_dim + padded(value_dim)) * element
    }

    /// Index in `keys` of element 0 of the key at `pos`, which is in page `page`; further elements follow at a distance
    /// of [`LANES`].
    pub(crate) fn key_at(&self, page: u32, head: usize, pos: usize) -> usize {
        let row = head * PAGE + pos % PAGE / LANES * LANES;
        page as usize * self.page_keys() + row * self.key_dim + pos % LANES
    }

    /// Index in `values` of the value row at `pos`, which is in page `page`.
    pub(crate) fn value_at(&self, page: u32, head: usize, pos: usize) -> usize {
        page as usize * self.page_values() + (head * PAGE + pos % PAGE) * padded(self.value_dim)
    }
}

/// `n` zeros straight from the system, which hands pages out as they are
/// touched: a context that is never filled costs no memory.
pub(crate) fn zeroed<E: Element>(n: usize) -> Option<Vec<E>> {
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
