# SPDX-License-Identifier: Apache-2.0
#
# `cpack -G DEB` and `cpack -G RPM` in the build tree: what `cmake --install` installs, into /usr,
# and the component `system`, which is for packages alone: units and configuration.
set(system ${CMAKE_CURRENT_LIST_DIR}/system)
set(deb ${CMAKE_CURRENT_LIST_DIR}/deb)
function(ckptfs_system directory name)
  cmake_parse_arguments(ARG "" "RENAME" "" ${ARGN})
  if(NOT ARG_RENAME)
    set(ARG_RENAME ${name})
  endif()
  install(FILES ${system}/${name} DESTINATION ${directory} RENAME ${ARG_RENAME} COMPONENT system EXCLUDE_FROM_ALL)
endfunction()
ckptfs_system(usr/lib/systemd/system ckptfs@.service)
ckptfs_system(usr/lib/systemd/system ckptfs-daemon.service)
ckptfs_system(usr/lib/tmpfiles.d ckptfs.tmpfiles RENAME ckptfs.conf)
ckptfs_system(etc/default ckptfs-daemon.default RENAME ckptfs-daemon)
ckptfs_system(etc/ckptfs README.conf RENAME README)
ckptfs_system(usr/share/doc/ckptfs/examples ckptfs-run7.example RENAME ckptfs-run7)

install(FILES ${deb}/copyright DESTINATION usr/share/doc/ckptfs COMPONENT system EXCLUDE_FROM_ALL)
string(TIMESTAMP CKPTFS_DATE "%a, %d %b %Y %H:%M:%S +0000" UTC)
configure_file(${deb}/changelog.in ${CMAKE_BINARY_DIR}/changelog @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/changelog DESTINATION usr/share/doc/ckptfs COMPONENT system EXCLUDE_FROM_ALL)
# zsh of Debian looks here.
file(CREATE_LINK ../site-functions/_ckptfs ${CMAKE_BINARY_DIR}/_ckptfs SYMBOLIC)
install(FILES ${CMAKE_BINARY_DIR}/_ckptfs DESTINATION usr/share/zsh/vendor-completions COMPONENT system EXCLUDE_FROM_ALL)
file(CREATE_LINK ../man1/ckptfs.1.gz ${CMAKE_BINARY_DIR}/mount.ckptfs.8.gz SYMBOLIC)
install(FILES ${CMAKE_BINARY_DIR}/mount.ckptfs.8.gz DESTINATION usr/share/man/man8 COMPONENT system EXCLUDE_FROM_ALL)

set(CPACK_PACKAGE_NAME ckptfs)
set(CPACK_PACKAGE_VENDOR ckptfs)
set(CPACK_PACKAGE_CONTACT "The ckptfs developers <ckptfs@packages.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "show training checkpoints as reconfigurable views")
set(CPACK_PACKAGE_DESCRIPTION
  "Mounts checkpoints of DeepSpeed, PyTorch and Hugging Face, and shows each of\n\
them as the files that any other parallel layout would load. Receives\n\
snapshots of running training jobs.")
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};ckptfs;ALL;/usr" "${CMAKE_BINARY_DIR};ckptfs;system;/")
option(CKPTFS_PORTABLE_PACKAGE "Packages have the portable program, for any release (`ninja ckptfs_portable` first)" OFF)
if(CKPTFS_PORTABLE_PACKAGE)
  list(APPEND CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};ckptfs;portable;/usr")
endif()
set(CPACK_PACKAGING_INSTALL_PREFIX /)
set(CPACK_STRIP_FILES ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/compress.cmake)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
  WORLD_READ WORLD_EXECUTE)

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION admin)
if(CKPTFS_PORTABLE_PACKAGE)
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "fuse3, libc6 (>= ${CKPTFS_GLIBC})")
else()
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_DEPENDS fuse3)
endif()
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS systemd)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${deb}/conffiles ${deb}/postinst ${deb}/prerm ${deb}/postrm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_RPM_FILE_NAME RPM-DEFAULT)
set(CPACK_RPM_PACKAGE_LICENSE Apache-2.0)
set(CPACK_RPM_PACKAGE_REQUIRES fuse3)
set(CPACK_RPM_USER_FILELIST "%config(noreplace) /etc/default/ckptfs-daemon")
set(CPACK_RPM_POST_INSTALL_SCRIPT_FILE ${deb}/../rpm/post)
set(CPACK_RPM_PRE_UNINSTALL_SCRIPT_FILE ${deb}/../rpm/preun)
set(CPACK_RPM_POST_UNINSTALL_SCRIPT_FILE ${deb}/../rpm/postun)
set(CPACK_RPM_EXCLUDE_FROM_AUTO_FILELIST_ADDITION /etc /etc/default /usr /usr/bin /usr/sbin /usr/lib /usr/lib/systemd
  /usr/lib/systemd/system /usr/lib/tmpfiles.d /usr/share /usr/share/man /usr/share/man/man1 /usr/share/doc
  /usr/share/bash-completion /usr/share/bash-completion/completions /usr/share/zsh /usr/share/zsh/site-functions
  /usr/share/fish /usr/share/fish/vendor_completions.d)
include(CPack)
