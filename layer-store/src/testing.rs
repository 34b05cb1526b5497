//! Archives by hand, for tests: every byte as the test wants it.

use crate::tar::BLOCK;

/// An archive in the making.
#[derive(Default)]
pub(crate) struct Archive(pub(crate) Vec<u8>);

/// Fields of a header, as ustar has them.
pub(crate) struct Fields<'a> {
    pub(crate) path: &'a [u8],
    pub(crate) flag: u8,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: u64,
    pub(crate) link: &'a [u8],
    pub(crate) device: (u32, u32),
    pub(crate) data: &'a [u8],
}

impl Default for Fields<'_> {
    fn default() -> Self {
        Self {
            path: b"",
            flag: b'0',
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 1_600_000_000,
            link: b"",
            device: (0, 0),
            data: b"",
        }
    }
}

impl Archive {
    /// Appends an entry.
    pub(crate) fn entry(&mut self, fields: &Fields<'_>) -> &mut Self {
        self.0.extend(header(fields));
        self.data(fields.data)
    }

    pub(crate) fn file(&mut self, path: &str, data: &[u8]) -> &mut Self {
        self.entry(&Fields {
            path: path.as_bytes(),
            data,
            ..Fields::default()
        })
    }

    pub(crate) fn directory(&mut self, path: &str, mode: u32) -> &mut Self {
        self.entry(&Fields {
            path: path.as_bytes(),
            flag: b'5',
            mode,
            ..Fields::default()
        })
    }

    pub(crate) fn link(&mut self, flag: u8, path: &str, target: &str) -> &mut Self {
        self.entry(&Fields {
            path: path.as_bytes(),
            flag,
            link: target.as_bytes(),
            ..Fields::default()
        })
    }

    /// Appends an extended header for the next entry.
    pub(crate) fn pax(&mut self, records: &[(&[u8], &[u8])]) -> &mut Self {
        let data: Vec<u8> = records
            .iter()
            .flat_map(|(key, value)| record(key, value))
            .collect();
        self.entry(&Fields {
            path: b"PaxHeaders/x",
            flag: b'x',
            data: &data,
            ..Fields::default()
        })
    }

    /// Appends the two blocks of zeros.
    pub(crate) fn end(&mut self) -> Vec<u8> {
        self.0.extend([0; 2 * BLOCK as usize]);
        std::mem::take(&mut self.0)
    }

    pub(crate) fn data(&mut self, data: &[u8]) -> &mut Self {
        self.0.extend(data);
        self.0
            .resize(self.0.len().next_multiple_of(BLOCK as usize), 0);
        self
    }
}

/// A ustar header. A longer path than its field is cut.
pub(crate) fn header(fields: &Fields<'_>) -> [u8; 512] {
    let mut block = [0; 512];
    let mut put = |at: usize, length: usize, bytes: &[u8]| {
        let length = length.min(bytes.len());
        block[at..at + length].copy_from_slice(&bytes[..length]);
    };
    put(0, 100, fields.path);
    put(100, 8, format!("{:07o}", fields.mode).as_bytes());
    put(108, 8, format!("{:07o}", fields.uid).as_bytes());
    put(116, 8, format!("{:07o}", fields.gid).as_bytes());
    put(124, 12, format!("{:011o}", fields.data.len()).as_bytes());
    put(136, 12, format!("{:011o}", fields.mtime).as_bytes());
    put(156, 1, &[fields.flag]);
    put(157, 100, fields.link);
    put(257, 8, b"ustar\x0000");
    put(329, 8, format!("{:07o}", fields.device.0).as_bytes());
    put(337, 8, format!("{:07o}", fields.device.1).as_bytes());
    sum(&mut block);
    block
}

/// Gives a header its checksum.
pub(crate) fn sum(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let body = [b" ", key, b"=", value, b"\n"].concat();
    let mut length = body.len();
    while length != body.len() + length.to_string().len() {
        length = body.len() + length.to_string().len();
    }
    [length.to_string().into_bytes(), body].concat()
}
