//! Reading a certificate signing request (PKCS #10) strictly. The signer parses the same bytes
//! with another library, so whatever two readers could take differently is refused.

use std::net::IpAddr;

use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::{
    OID_X509_COMMON_NAME, OID_X509_EXT_SUBJECT_ALT_NAME, OID_X509_ORGANIZATION_NAME,
};
use x509_parser::prelude::FromDer;

use crate::profile::ip_from_octets;

/// A serving request is a few hundred bytes; RSA keys and many names make it some thousand.
const MAX_BYTES: usize = 32 * 1024;
const HEADER: &[u8] = b"-----BEGIN CERTIFICATE REQUEST-----";

/// What a request asks to be certified.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) common_name: String,
    pub(super) organization: String,
    pub(super) dns: Vec<String>,
    pub(super) ips: Vec<IpAddr>,
}

/// Parses a PEM request and checks its signature; the error is a text for the requester.
pub(super) fn parse(pem: &[u8]) -> Result<Request, String> {
    if pem.len() > MAX_BYTES {
        return Err(format!("the request is larger than {MAX_BYTES} bytes"));
    }
    if !pem.starts_with(HEADER) {
        return Err("the request does not begin with a CERTIFICATE REQUEST in PEM".to_owned());
    }
    let (rest, block) = x509_parser::pem::parse_x509_pem(pem)
        .map_err(|_| "the request is not valid PEM".to_owned())?;
    if !rest.trim_ascii().is_empty() {
        return Err("the request has data after its end".to_owned());
    }
    let (rest, csr) = X509CertificationRequest::from_der(&block.contents)
        .map_err(|_| "the request is not valid PKCS #10".to_owned())?;
    if !rest.is_empty() {
        return Err("the request has data after its end".to_owned());
    }
    csr.verify_signature()
        .map_err(|_| "the request is not signed with the key it is for".to_owned())?;

    let (mut common_name, mut organization) = (None, None);
    for attribute in csr.certification_request_info.subject.iter_attributes() {
        let oid = attribute.attr_type();
        let slot = if *oid == OID_X509_COMMON_NAME {
            &mut common_name
        } else if *oid == OID_X509_ORGANIZATION_NAME {
            &mut organization
        } else {
            return Err(format!(
                "the subject has an attribute {oid} besides O and CN"
            ));
        };
        let text = attribute
            .as_str()
            .map_err(|_| "the subject is not plain text".to_owned())?;
        if slot.replace(text.to_owned()).is_some() {
            return Err("the subject must have exactly one O and one CN".to_owned());
        }
    }
    let (Some(common_name), Some(organization)) = (common_name, organization) else {
        return Err("the subject must have exactly one O and one CN".to_owned());
    };
    let (dns, ips) = alternative_names(&csr)?;
    Ok(Request {
        common_name,
        organization,
        dns,
        ips,
    })
}

fn alternative_names(
    csr: &X509CertificationRequest<'_>,
) -> Result<(Vec<String>, Vec<IpAddr>), String> {
    let mut attributes = csr.certification_request_info.iter_attributes();
    let extensions = match (attributes.next(), attributes.next()) {
        (Some(only), None) => match only.parsed_attribute() {
            ParsedCriAttribute::ExtensionRequest(requested) => requested.extensions.as_slice(),
            _ => return Err("the request has an attribute that is not supported".to_owned()),
        },
        (None, _) => &[],
        (Some(_), Some(_)) => return Err("the request has more than one attribute".to_owned()),
    };
    let mut found = None;
    for extension in extensions {
        if extension.oid != OID_X509_EXT_SUBJECT_ALT_NAME {
            // The signer takes usages from the object's spec and ignores the rest.
            continue;
        }
        let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
            return Err("the subject alternative names are not readable".to_owned());
        };
        if found.replace(names).is_some() {
            return Err("the subject alternative names are given twice".to_owned());
        }
    }
    let (mut dns, mut ips) = (Vec::new(), Vec::new());
    for name in found.iter().flat_map(|names| &names.general_names) {
        match name {
            GeneralName::DNSName(name) => dns.push((*name).to_owned()),
            GeneralName::IPAddress(octets) => ips.push(
                ip_from_octets(octets)
                    .ok_or("an IP name has neither 4 nor 16 octets")?
                    .to_canonical(),
            ),
            _ => return Err("only DNS and IP subject alternative names are allowed".to_owned()),
        }
    }
    Ok((dns, ips))
}
