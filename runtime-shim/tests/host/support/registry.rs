//! A registry with one image under every name and tag, but those of `missing/`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use super::image::TestImage;

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub(crate) async fn serve(image: TestImage) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let image = Arc::new(image);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let image = image.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let image = image.clone();
                    async move { Ok::<_, Infallible>(answer(&image, &request)) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    address
}

fn answer(image: &TestImage, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let response = Response::builder();
    if path == "/v2/" {
        return response.body(Full::default()).unwrap();
    }
    let mut parts = path.rsplitn(3, '/');
    let (reference, kind) = (parts.next().unwrap(), parts.next().unwrap_or_default());
    let digest = match kind {
        _ if path.starts_with("/v2/missing/") => "",
        "manifests" if reference.starts_with("sha256:") => reference,
        "manifests" => &image.manifest,
        _ => reference,
    };
    let Some(blob) = image.blobs.get(digest) else {
        return response.status(404).body(Full::default()).unwrap();
    };
    let kind = if kind == "manifests" {
        MANIFEST
    } else {
        "application/octet-stream"
    };
    let head = request.method() == hyper::Method::HEAD;
    response
        .header("content-type", kind)
        .header("content-length", blob.len())
        .header("docker-content-digest", digest)
        .body(if head {
            Full::default()
        } else {
            Full::from(blob.clone())
        })
        .unwrap()
}
