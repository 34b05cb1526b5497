//! What a certificate says, as plain data. The same value drives issuing, verification of files found on disk, and renewal.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyUsagePurpose, SanType,
};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;

/// What the holder of a certificate may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Sign other certificates; signed ones may not sign in turn.
    Authority,
    /// Answer TLS connections.
    Server,
    /// Open TLS connections.
    Client,
    /// Both, for peers of equal standing.
    Peer,
}

/// Subject, names and usage of a certificate: everything but key, serial number and dates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Common name; the user name in Kubernetes.
    pub common_name: String,
    /// Organization; the group in Kubernetes.
    pub organization: Option<String>,
    /// DNS subject alternative names.
    pub dns: Vec<String>,
    /// IP subject alternative names.
    pub ips: Vec<IpAddr>,
    /// URI subject alternative names; fleet roles are carried here.
    pub uris: Vec<String>,
    /// What the key may be used for.
    pub usage: Usage,
}

impl Profile {
    /// A profile without organization and alternative names.
    pub fn new(common_name: impl Into<String>, usage: Usage) -> Self {
        Self {
            common_name: common_name.into(),
            organization: None,
            dns: Vec::new(),
            ips: Vec::new(),
            uris: Vec::new(),
            usage,
        }
    }

    /// The same with an organization.
    #[must_use]
    pub fn organization(mut self, organization: impl Into<String>) -> Self {
        self.organization = Some(organization.into());
        self
    }

    /// The same with these DNS names and addresses, each once, in the order given.
    #[must_use]
    pub fn hosts(
        mut self,
        dns: impl IntoIterator<Item = String>,
        ips: impl IntoIterator<Item = IpAddr>,
    ) -> Self {
        for name in dns {
            push_once(&mut self.dns, name);
        }
        for ip in ips {
            push_once(&mut self.ips, ip);
        }
        self
    }

    /// The same with a URI name.
    #[must_use]
    pub fn uri(mut self, uri: impl Into<String>) -> Self {
        push_once(&mut self.uris, uri.into());
        self
    }

    /// Subject in the usual one-line form, organization first.
    pub fn subject(&self) -> String {
        match &self.organization {
            Some(organization) => format!("O={organization}, CN={}", self.common_name),
            None => format!("CN={}", self.common_name),
        }
    }

    /// All alternative names with their kind, as shown to people.
    pub fn names(&self) -> Vec<String> {
        let dns = self.dns.iter().map(|name| format!("DNS:{name}"));
        let ips = self.ips.iter().map(|ip| format!("IP:{ip}"));
        let uris = self.uris.iter().map(|uri| format!("URI:{uri}"));
        dns.chain(ips).chain(uris).collect()
    }

    pub(crate) fn params(&self) -> Result<CertificateParams, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if let Some(organization) = &self.organization {
            params
                .distinguished_name
                .push(DnType::OrganizationName, organization.as_str());
        }
        params
            .distinguished_name
            .push(DnType::CommonName, self.common_name.as_str());
        for name in &self.dns {
            params
                .subject_alt_names
                .push(SanType::DnsName(name.as_str().try_into()?));
        }
        params
            .subject_alt_names
            .extend(self.ips.iter().copied().map(SanType::IpAddress));
        for uri in &self.uris {
            params
                .subject_alt_names
                .push(SanType::URI(uri.as_str().try_into()?));
        }
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        match self.usage {
            Usage::Authority => {
                params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
                params.key_usages = vec![
                    KeyUsagePurpose::DigitalSignature,
                    KeyUsagePurpose::KeyCertSign,
                    KeyUsagePurpose::CrlSign,
                ];
            }
            Usage::Server => {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            }
            Usage::Client => {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            }
            Usage::Peer => {
                params.extended_key_usages = vec![
                    ExtendedKeyUsagePurpose::ServerAuth,
                    ExtendedKeyUsagePurpose::ClientAuth,
                ];
            }
        }
        Ok(params)
    }

    /// Reads a profile back from a certificate. Anything that a profile cannot hold is an error,
    /// so that renewing never drops a name or a right unnoticed.
    pub(crate) fn from_x509(certificate: &X509Certificate<'_>) -> Result<Self, String> {
        let usage = usage_of(certificate)?;
        let mut common_name = None;
        let mut organization = None;
        for attribute in certificate.subject().iter_attributes() {
            let value = attribute
                .as_str()
                .map_err(|e| format!("subject is not text: {e}"))?;
            let oid = attribute.attr_type();
            let slot = if *oid == x509_parser::oid_registry::OID_X509_COMMON_NAME {
                &mut common_name
            } else if *oid == x509_parser::oid_registry::OID_X509_ORGANIZATION_NAME {
                &mut organization
            } else {
                return Err(format!("subject attribute {oid} is not supported"));
            };
            if slot.replace(value.to_owned()).is_some() {
                return Err(format!("subject attribute {oid} is given twice"));
            }
        }
        let common_name = common_name.ok_or("subject has no common name")?;
        let mut profile = Self {
            organization,
            ..Self::new(common_name, usage)
        };
        let names = certificate
            .subject_alternative_name()
            .map_err(|e| format!("subject alternative names: {e}"))?;
        for name in names
            .iter()
            .flat_map(|extension| &extension.value.general_names)
        {
            match name {
                GeneralName::DNSName(dns) => profile.dns.push((*dns).to_owned()),
                GeneralName::URI(uri) => profile.uris.push((*uri).to_owned()),
                GeneralName::IPAddress(octets) => profile
                    .ips
                    .push(ip_from_octets(octets).ok_or("an IP name has neither 4 nor 16 octets")?),
                other => return Err(format!("alternative name {other} is not supported")),
            }
        }
        Ok(profile)
    }
}

/// Address in the binary form of certificates: 4 or 16 octets.
pub(crate) fn ip_from_octets(octets: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(octets) {
        return Some(Ipv4Addr::from(v4).into());
    }
    <[u8; 16]>::try_from(octets)
        .ok()
        .map(|v6| Ipv6Addr::from(v6).into())
}

fn usage_of(certificate: &X509Certificate<'_>) -> Result<Usage, String> {
    if certificate.is_ca() {
        return Ok(Usage::Authority);
    }
    let extension = certificate
        .extended_key_usage()
        .map_err(|e| format!("extended key usage: {e}"))?
        .ok_or("has no extended key usage")?
        .value;
    match (extension.server_auth, extension.client_auth) {
        (true, true) => Ok(Usage::Peer),
        (true, false) => Ok(Usage::Server),
        (false, true) => Ok(Usage::Client),
        (false, false) => Err("is for neither TLS servers nor TLS clients".to_owned()),
    }
}

fn push_once<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_appear_once_in_the_order_given() {
        let ip: IpAddr = "10.0.0.1".parse().unwrap();
        let profile = Profile::new("host-1", Usage::Server)
            .hosts(["b".to_owned(), "a".to_owned(), "b".to_owned()], [ip, ip])
            .uri("spiffe://x/y");
        assert_eq!(
            profile.names(),
            ["DNS:b", "DNS:a", "IP:10.0.0.1", "URI:spiffe://x/y"]
        );
    }

    #[test]
    fn subject_shows_the_organization_first() {
        let profile = Profile::new("admin", Usage::Client).organization("system:masters");
        assert_eq!(profile.subject(), "O=system:masters, CN=admin");
    }

    #[test]
    fn only_whole_addresses_are_read() {
        assert_eq!(
            ip_from_octets(&[10, 0, 0, 1]),
            Some("10.0.0.1".parse().unwrap())
        );
        assert_eq!(ip_from_octets(&[0; 16]), Some("::".parse().unwrap()));
        assert_eq!(ip_from_octets(&[10, 0, 0, 0, 255, 0, 0, 0]), None);
    }
}
