//! A table of strings in one allocation, found by number or by text.

use foldhash::fast::RandomState;
use std::hash::BuildHasher;

/// A map whose hashes differ from map to map, so that no file and no text can choose keys that collide.
pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;

const EMPTY: u32 = u32::MAX;

/// A slot of the hash table: part of the hash, to skip most comparisons, and the string's number.
#[derive(Clone, Copy)]
struct HashSlot {
    tag: u32,
    id: u32,
}

/// Strings numbered in the order in which they were pushed. A vocabulary of
/// 150 000 tokens is three allocations instead of 150 000.
///
/// The sum of the lengths must stay below 4 GiB; the caller checks that.
pub(crate) struct StringTable {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    slots: Vec<HashSlot>,
    /// Of another table the hashes are others, so that no file can choose strings that meet in one slot.
    hashes: RandomState,
}

impl StringTable {
    pub(crate) fn with_capacity(strings: usize, bytes: usize) -> Self {
        let slots = (strings * 2).next_power_of_two().max(16);
        Self {
            bytes: Vec::with_capacity(bytes),
            ends: Vec::with_capacity(strings),
            slots: vec![HashSlot { tag: 0, id: EMPTY }; slots],
            hashes: RandomState::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The string with number `id`, or an empty one when there is none.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Appends a string under the next number. Of equal strings the last one pushed is found by [`get`](Self::get).
    pub(crate) fn push(&mut self, text: &[u8]) -> u32 {
        let id = self.ends.len() as u32;
        self.bytes.extend_from_slice(text);
        self.ends.push(self.bytes.len() as u32);
        if self.ends.len() * 2 > self.slots.len() {
            self.grow();
        }
        let (slot, tag) = self.find(text);
        self.slots[slot] = HashSlot { tag, id };
        id
    }

    /// The number of a string.
    pub(crate) fn get(&self, text: &[u8]) -> Option<u32> {
        let id = self.slots[self.find(text).0].id;
        (id != EMPTY).then_some(id)
    }

    /// The slot that holds `text`, or the empty one where it belongs, and its tag.
    fn find(&self, text: &[u8]) -> (usize, u32) {
        let hash = self.hashes.hash_one(text);
        let tag = (hash >> 32) as u32;
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let HashSlot { tag: slot_tag, id } = self.slots[slot];
            if id == EMPTY || (slot_tag == tag && self.bytes(id) == text) {
                return (slot, tag);
            }
            slot = (slot + 1) & mask;
        }
    }

    fn grow(&mut self) {
        self.slots = vec![HashSlot { tag: 0, id: EMPTY }; self.slots.len() * 2];
        // All but the newest, which the caller places.
        for id in 0..self.ends.len() as u32 - 1 {
            let (slot, tag) = self.find(self.bytes(id));
            self.slots[slot] = HashSlot { tag, id };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_strings_in_order_and_finds_the_last_of_equals() {
        let mut table = StringTable::with_capacity(0, 0);
        for i in 0..1000 {
            assert_eq!(table.push(format!("s{i}").as_bytes()), i);
        }
        assert_eq!(table.push(b"s7"), 1000);
        assert_eq!(table.get(b"s7"), Some(1000));
        assert_eq!(table.get(b"s999"), Some(999));
        assert_eq!(table.get(b"s1000"), None);
        assert_eq!(table.bytes(12), b"s12");
        assert_eq!(table.bytes(5000), b"");
        assert_eq!(table.len(), 1001);
        let other = StringTable::with_capacity(0, 0);
        assert_ne!(table.hashes.hash_one(&b"s7"[..]), other.hashes.hash_one(&b"s7"[..]));
    }
}
