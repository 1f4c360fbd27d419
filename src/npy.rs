//! `NumPy`'s `.npy` files, version 1.0: a header with type and shape, then the numbers.

use std::io::{self, Write};

/// Writes the header of a little-endian float32 matrix, row-major, `[n_rows, n_columns]`.
pub fn write_header(out: &mut impl Write, n_rows: usize, n_columns: usize) -> io::Result<()> {
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {n_columns}), }}");
    // The ten bytes before the header and the header with its line break are a multiple of 64 bytes long.
    let unpadded = 10 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', unpadded.next_multiple_of(64) - unpadded));
    header.push('\n');
    out.write_all(b"\x93NUMPY\x01\x00")?;
    out.write_all(&(header.len() as u16).to_le_bytes())?;
    out.write_all(header.as_bytes())
}

/// Writes the next numbers of the matrix, in row-major order.
pub fn write_numbers(out: &mut impl Write, numbers: &[f32]) -> io::Result<()> {
    numbers.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_as_numpy_writes_it() {
        let mut file = Vec::new();
        write_header(&mut file, 5, 512).unwrap();
        write_numbers(&mut file, &[1.0, -2.5]).unwrap();
        let dict = b"{'descr': '<f4', 'fortran_order': False, 'shape': (5, 512), }";
        assert_eq!(&file[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert_eq!(&file[10..10 + dict.len()], dict);
        assert!(file[10 + dict.len()..127].iter().all(|&b| b == b' '));
        assert_eq!(file[127], b'\n');
        assert_eq!(file[128..], [0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0]);
    }
}
