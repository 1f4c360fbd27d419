//! A trie of byte strings with `u32` values, in three flat arrays. It finds all strings that a text starts with.

/// The value of a node where no string ends.
const NONE: u32 = u32::MAX;

/// A trie. Nodes are numbered level by level from the root (0), so that the children of a node are adjacent and are
/// followed by those of the next node. A node takes nine bytes; there are at most as many nodes as the strings have
/// bytes, plus the root.
pub(crate) struct Trie {
    /// The first child of each node, and one more entry that ends the children of the last node.
    children: Vec<u32>,
    /// The byte on the edge to each node; ascending among siblings.
    bytes: Vec<u8>,
    /// The value of the string that ends at each node, or [`NONE`].
    values: Vec<u32>,
}

/// The root node, where every string starts.
pub(crate) const ROOT: u32 = 0;

impl Trie {
    /// Builds a trie of strings with values below `u32::MAX`. Of equal strings the first one is kept.
    pub(crate) fn new(mut strings: Vec<(&[u8], u32)>) -> Self {
        // A stable sort, so that equal strings keep their order.
        strings.sort_by_key(|&(string, _)| string);
        let mut trie = Self { children: Vec::new(), bytes: vec![0], values: Vec::new() };
        // For each node of the current level: the strings that pass through it.
        let mut level = vec![&strings[..]];
        let mut depth = 0;
        while !level.is_empty() {
            let mut next = Vec::new();
            for through in level {
                let (ending, longer) = through.split_at(through.partition_point(|(string, _)| string.len() == depth));
                trie.values.push(ending.first().map_or(NONE, |&(_, value)| value));
                trie.children.push(trie.bytes.len() as u32);
                for child in longer.chunk_by(|(a, _), (b, _)| a[depth] == b[depth]) {
                    trie.bytes.push(child[0].0[depth]);
                    next.push(child);
                }
            }
            level = next;
            depth += 1;
        }
        trie.children.push(trie.bytes.len() as u32);
        trie
    }

    pub(crate) fn n_nodes(&self) -> u32 {
        self.values.len() as u32
    }

    /// The children of a node, each with the byte on its edge.
    pub(crate) fn children(&self, node: u32) -> impl Iterator<Item = (u8, u32)> {
        let (start, end) = (self.children[node as usize], self.children[node as usize + 1]);
        (start..end).map(|child| (self.bytes[child as usize], child))
    }

    /// The child of a node along `byte`; `None` if there is none.
    pub(crate) fn child(&self, node: u32, byte: u8) -> Option<u32> {
        #[cfg(test)]
        crate::steps::count();
        let (start, end) = (self.children[node as usize] as usize, self.children[node as usize + 1] as usize);
        self.bytes[start..end].binary_search(&byte).ok().map(|i| (start + i) as u32)
    }

    /// The value of the string that ends at a node; `None` if none ends there.
    pub(crate) fn value(&self, node: u32) -> Option<u32> {
        Some(self.values[node as usize]).filter(|&value| value != NONE)
    }

    /// The lengths and values of all strings that are a prefix of `text`, shortest first.
    pub(crate) fn prefixes(&self, text: &[u8]) -> impl Iterator<Item = (usize, u32)> {
        let mut node = ROOT;
        let nodes = text.iter().map_while(move |&byte| {
            node = self.child(node, byte)?;
            Some(node)
        });
        (1..).zip(nodes).filter_map(|(len, node)| Some((len, self.value(node)?)))
    }

    /// Whether `text` is a prefix of one of the strings.
    pub(crate) fn begins(&self, text: &[u8]) -> bool {
        text.iter().try_fold(ROOT, |node, &byte| self.child(node, byte)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_found_by_their_beginnings() {
        let strings: [&[u8]; 7] = [b"abc", b"a", b"b", b"abd", b"a", b"ab\xFF", b""];
        let trie = Trie::new(strings.iter().zip(0..).map(|(&string, value)| (string, value)).collect());
        assert_eq!(trie.n_nodes(), 1 + 2 + 1 + 3);
        let found = |text: &[u8]| trie.prefixes(text).collect::<Vec<_>>();
        // The string "a" occurs twice; the first one is kept.
        assert_eq!(found(b"abcd"), [(1, 1), (3, 0)]);
        assert_eq!(found(b"ab\xFF"), [(1, 1), (3, 5)]);
        assert_eq!(found(b"ba"), [(1, 2)]);
        assert_eq!(found(b"x"), []);
        assert!(trie.begins(b"ab") && trie.begins(b"") && !trie.begins(b"ac") && !trie.begins(b"abcd"));
        assert_eq!(trie.children(ROOT).collect::<Vec<_>>(), [(b'a', 1), (b'b', 2)]);
        assert_eq!(trie.value(ROOT), Some(6));
        assert_eq!(Trie::new(Vec::new()).prefixes(b"a").count(), 0);
    }
}
