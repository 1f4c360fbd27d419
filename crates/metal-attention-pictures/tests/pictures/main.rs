//! Decoding, resizing and dividing pictures.

mod decode;
mod families;
mod hostile;
mod resize;

use std::path::Path;

use metal_attention_pictures::Picture;

/// A file of the folder `data`.
fn data(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pictures/data").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Numbers that look random (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    /// A number from 1 to `most`.
    fn up_to(&mut self, most: usize) -> usize {
        self.next() as usize % most + 1
    }

    fn picture(&mut self, width: usize, height: usize) -> Picture {
        Picture::new(width, height, (0..width * height * 3).map(|_| self.next() as u8).collect()).unwrap()
    }
}
