// SPDX-License-Identifier: Apache-2.0
//
// The zip structures that torch.save files consist of (PKWARE APPNOTE 6.3.10,
// sections 4.3 and 4.5; what caffe2/serialize/inline_container.cc writes):
//
//   archive = (local name extra payload [descriptor])*  central*  end64  locator  end
//   local   30: u32 sig | u16 version flags method time date | u32 crc csize usize | u16 nlen elen
//   central 46: u32 sig | u16 made needed flags method time date | u32 crc csize usize |
//               u16 nlen elen clen disk iattr | u32 eattr header_offset, then name extra comment
//   end64   56: u32 sig | u64 44 | u16 made needed | u32 disk disk | u64 n n cd_size cd_offset
//   locator 20: u32 sig | u32 disk | u64 end64_offset | u32 disks
//   end     22: u32 sig | u16 disk disk n n | u32 cd_size cd_offset | u16 comment_length
//   extra   =   (u16 id | u16 length | bytes)*; id 1 (zip64) holds, in this order, those of
//               u64 usize csize header_offset whose 32-bit field is 0xffffffff
//
// Thread safety: constants and pure functions.
// Units: bytes; all integers little-endian.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ckptfs::zip {

inline constexpr uint32_t kLocalSignature = 0x04034b50;
inline constexpr uint32_t kCentralSignature = 0x02014b50;
inline constexpr uint32_t kEnd64Signature = 0x06064b50;
inline constexpr uint32_t kLocatorSignature = 0x07064b50;
inline constexpr uint32_t kEndSignature = 0x06054b50;

inline constexpr uint64_t kLocalBytes = 30;
inline constexpr uint64_t kCentralBytes = 46;
inline constexpr uint64_t kEnd64Bytes = 56;
inline constexpr uint64_t kLocatorBytes = 20;
inline constexpr uint64_t kEndBytes = 22;

inline constexpr uint16_t kFlagEncrypted = 0x0001;
inline constexpr uint16_t kFlagDescriptor = 0x0008;  // sizes and CRC follow the payload
inline constexpr uint16_t kFlagPatched = 0x0020;
inline constexpr uint16_t kFlagStrongEncryption = 0x0040;
inline constexpr uint16_t kFlagUtf8 = 0x0800;
inline constexpr uint16_t kFlagMasked = 0x2000;  // encrypted central directory

inline constexpr uint16_t kZip64Extra = 1;
inline constexpr uint32_t kBig32 = 0xffffffff;
inline constexpr uint16_t kBig16 = 0xffff;
inline constexpr uint64_t kAlignment = 64;  // of payloads, as torch aligns them

// Little-endian integer at `at`.  REQUIRES: it lies inside `bytes`.
template <class Integer>
Integer Load(std::string_view bytes, size_t at) {
  Integer value = 0;
  for (size_t i = sizeof(Integer); i-- > 0;) {
    value = static_cast<Integer>((value << 8) | static_cast<unsigned char>(bytes[at + i]));
  }
  return value;
}

template <class Integer>
void Store(std::string& out, Integer value) {
  for (size_t i = 0; i < sizeof(Integer); ++i) {
    out += static_cast<char>((value >> (8 * i)) & 0xff);
  }
}

}  // namespace ckptfs::zip
