"""The site on this machine: starts what a Modelyard site runs on (Valkey, Ray), deploys it, and takes all of it down again."""
