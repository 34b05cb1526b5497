//! The virtual node's HTTPS port, called without the API server between.

use std::sync::Arc;

use anyhow::Result;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::variable;

/// Answers larger than this are a fault.
const MAX_BODY_BYTES: usize = 64 << 20;

/// Where the port is reachable from the tests, and who signed its certificate.
pub struct NodePort {
    address: String,
    server_name: String,
    roots: RootCertStore,
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status code.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

impl NodePort {
    /// Reads the environment.
    ///
    /// # Errors
    /// Names the variable that is missing.
    pub fn from_env() -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(variable("SANDMAN_CLUSTER_CA")?)? {
            roots.add(certificate?)?;
        }
        let kubelet: std::net::SocketAddr = variable("SANDMAN_KUBELET")?.parse()?;
        let server_name = kubelet.ip().to_string();
        Ok(Self {
            address: variable("SANDMAN_KUBELET_LOCAL")?,
            server_name,
            roots,
        })
    }

    /// GETs a path, with a bearer token if there is one.
    ///
    /// # Errors
    /// When the node does not answer in HTTP over TLS with a certificate of
    /// the cluster for its own address.
    pub async fn get(&self, path: &str, token: Option<&str>) -> Result<Answer> {
        let config = ClientConfig::builder()
            .with_root_certificates(self.roots.clone())
            .with_no_client_auth();
        let stream = TcpStream::connect(&self.address).await?;
        let name = ServerName::try_from(self.server_name.clone())?;
        let stream = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let mut request = hyper::Request::get(path).header("host", &self.server_name);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = sender
            .send_request(request.body(Empty::<Bytes>::new())?)
            .await?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), MAX_BODY_BYTES)
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!("read the answer: {error}"))?
            .to_bytes();
        connection.abort();
        Ok(Answer {
            status,
            body: String::from_utf8_lossy(&body).into_owned(),
        })
    }
}
